"""The commands of a fresh process that measures its own start. PyTorch is not imported before that is timed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampcheck.core.environment import environment
from ampcheck.core.subject import Call, Kind, Subject, load_subject
from ampcheck.records.startup import Lookup
from ampcheck.records.threads import Threads
from ampcheck.speed import memory
from ampcheck.speed.clock import Clock, clock_of

if TYPE_CHECKING:
    from ampcheck.speed.paired import Step
    from ampcheck.speed.steps import StepConfig

PASSES = 3
"""First steps that are timed one by one: the first compiles, the second may compile again for gradients or shapes."""

Figures = dict[str, Any]
"""Fields of a `Launch`."""


class Start:
    """A subject from its import to its steady state: `load`, then the others in any order."""

    def __init__(self) -> None:
        self.subject: Subject
        self.step: Step
        self.clock: Clock
        self.device = "cpu"
        self.backward: bool | None = None
        self.before = 0

    def load(self, target: str, device: str, backward: bool | None) -> tuple[dict[str, Any], Figures]:
        """Import PyTorch, then the subject: facts about the subject, and seconds of each import.

        own: it compiles by itself. blocks: number of repeated ones. varying: whether shapes differ from call to call.
        """
        begin = time.perf_counter()
        import torch  # noqa: F401

        imported = time.perf_counter()
        self.subject = load_subject(target)
        loaded = time.perf_counter()
        self.device, self.backward = device, backward
        from ampcheck.speed.steps import repeated
        from ampcheck.torchtools.copying import is_compiled_already

        self.clock = clock_of(device)  # raises for a device that is not there
        model = self.subject.model
        facts = {
            "name": self.subject.name,
            "own": self.subject.kind in (Kind.CALL, Kind.TRAINING) or is_compiled_already(self.subject),
            "blocks": len(repeated(model)) if hasattr(model, "modules") else 0,
            "varying": len({_shapes(call) for call in self.subject.calls}) > 1,
            "environment": environment(device),
        }
        return facts, {"imported": imported - begin, "loaded": loaded - imported}

    def load_artifacts(self, path: str) -> Figures:
        """Load the artifacts that another process saved."""
        import torch

        data = Path(path).read_bytes()
        begin = time.perf_counter()
        info = torch.compiler.load_cache_artifacts(data)
        return {"artifacts_loaded": time.perf_counter() - begin, "taken": _artifacts(info)}

    def save_artifacts(self, path: str) -> Figures:
        """Save what was compiled; unsaved: why this PyTorch cannot."""
        import torch

        if not hasattr(torch.compiler, "save_cache_artifacts"):
            return {"unsaved": f"PyTorch {torch.__version__} has no torch.compiler.save_cache_artifacts (2.7 has)"}
        data, info = torch.compiler.save_cache_artifacts() or (b"", None)
        Path(path).write_bytes(data)
        return {"saved": _artifacts(info), "saved_bytes": len(data), "unsaved": ""}

    def start(self, config: Mapping[str, Any]) -> Figures:
        """Build a step of this configuration, and run the first few."""
        from ampcheck.compiled.graph.recorder import GraphRecorder
        from ampcheck.compiled.graph.run import Passes
        from ampcheck.compiled.graph.trace import FIRST, LATE, WARM
        from ampcheck.speed.steps import EAGER, StepConfig
        from ampcheck.torchtools import dynamo

        chosen = StepConfig(**config)
        if chosen.mode == EAGER:
            return self._run(chosen, [nullcontext] * PASSES)
        recorder, trace = GraphRecorder(), list[dynamo.TraceRecord]()

        def stage(name: str) -> AbstractContextManager[None]:
            recorder.log.stage = name
            return nullcontext()

        before = _binaries()
        begin = time.perf_counter()
        with dynamo.compile_trace(trace.append), recorder.trace():  # these import Dynamo, as the user's own start does
            imported = time.perf_counter() - begin
            figures = self._run(chosen, [partial(stage, name) for name in (FIRST, WARM, LATE)])
            figures["built"] += imported
            with recorder.profile():  # slows Python down, and comes after the timed steps
                self.step()
        lookups = (_lookup(record.name, record.text) for record in trace)
        figures.update(
            compiling=dynamo.compile_seconds(),
            kernels=dynamo.kernel_count(),
            off=_disabled_caches(),
            untold=dynamo.trace_unsupported(),
            binaries=len(_binaries() - before),
            lookups=tuple(lookup for lookup in lookups if lookup is not None),
        )
        if not figures["untold"]:
            figures["graph"] = recorder.stats(self.subject.name, Passes(calls=PASSES + 1), device=self.device)
        return figures

    def _run(self, config: StepConfig, around: Sequence[Callable[[], AbstractContextManager[None]]]) -> Figures:
        """Seconds to build a step of this configuration, and of the first few."""
        from ampcheck.speed.steps import step_of

        begin = time.perf_counter()
        self.step = step_of(self.subject, config, device=self.device, backward=self.backward)
        built, passes = time.perf_counter() - begin, []
        self.before = memory.allocated_memory(self.device)  # the weights of the step's own copy
        for context in around:
            with context():
                passes.append(self.clock.block(self.step, 1))
        return {"built": built, "passes": tuple(passes)}

    def memory(self) -> Figures:
        """Peak memory of a step."""
        peak = memory.peak_memory(self.step, device=self.device, before=self.before if self.device != "cpu" else None)
        return {"memory": peak.bytes, "memory_untold": peak.reason}

    def pair(self, precision: str, seconds: float) -> Figures:
        """The steady state and that of an eager copy, block by block."""
        import torch

        from ampcheck.speed.paired import measure_speed
        from ampcheck.speed.steps import StepConfig, step_of

        count = torch.get_num_threads()
        threads = Threads(count, count)  # those of the start: with others it would be compiled again
        eager = step_of(self.subject, StepConfig(precision=precision), device=self.device, backward=self.backward)
        arms = {"eager": eager, "this": self.step}
        stats = measure_speed(
            arms, subject=self.subject.name, device=self.device, budget=seconds, width=None, threads=threads
        )
        return {"times": (stats.reference, *stats.compared)}


def _shapes(call: Call) -> tuple[object, ...]:
    from ampcheck.torchtools.pytree import tensors

    return tuple(tuple(tensor.shape) for _, tensor in tensors((call.args, dict(call.kwargs))))


def _binaries() -> set[str]:
    """Files that C++ compilers built in Inductor's folder; Triton's is left out, where caches are unpacked."""
    folder, triton = (os.environ.get(name, "") for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"))
    files = Path(folder).rglob("*.so") if folder else ()
    return {str(path) for path in files if not (triton and path.is_relative_to(triton))}


def _artifacts(info: object) -> int:
    """The number of artifacts of a `CacheInfo`."""
    groups: Mapping[str, Sequence[str]] = getattr(info, "artifacts", None) or {}
    return sum(len(keys) for keys in groups.values())


_CACHES = {"fx_graph_cache": "FX graph cache", "aotautograd_cache": "AOTAutograd cache"}


def _lookup(name: str, text: str) -> Lookup | None:
    """A record of the trace as a `Lookup`; a key's parts are `[hash] name: value`."""
    cache, _, result = name.rpartition("_")
    if cache not in _CACHES:
        return None
    data: dict[str, Any] = {}
    with suppress(ValueError):
        data = json.loads(text)
    parts = {}
    for part in data.get("components") or ():
        number, _, rest = str(part).partition("] ")
        label, _, value = rest.partition(": ")
        parts[label] = value if len(value) <= 60 else number.lstrip("[")
    reason = str(data.get("cache_bypass_reason") or "")
    return Lookup(_CACHES[cache], result, reason, parts)


def _disabled_caches() -> tuple[str, ...]:
    from ampcheck.torchtools.dynamo import setting

    disabled: list[str] = []
    for name, off in (
        ("torch._inductor.config.force_disable_caches", True),
        ("torch._inductor.config.fx_graph_cache", False),
        ("torch._functorch.config.enable_autograd_cache", False),
    ):
        with suppress(AttributeError):  # a release without the setting
            if setting(name) is off:
                disabled.append(f"{name} is {off}")
    return tuple(disabled)
