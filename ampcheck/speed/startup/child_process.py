"""What a fresh process does to measure its own start. Nothing of PyTorch is imported before it is timed."""

from __future__ import annotations

import base64
import json
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampcheck.core.subject import Kind, Subject, load_subject

if TYPE_CHECKING:
    from ampcheck.speed.paired import Step
    from ampcheck.speed.steps import Way

PASSES = 3
"""First steps that are timed one by one: the first compiles, the second may compile again for what varies."""


def commands() -> Mapping[str, Callable[..., Any]]:
    """What this process can be asked: `load`, then `take`, `start`, `save`, `memory` and `pair` as needed."""
    start = _Start()
    return {
        "load": start.load,
        "take": start.take,
        "start": start.start,
        "save": start.save,
        "memory": start.memory,
        "pair": start.pair,
    }


class _Start:
    """A subject on its way from nothing to its steady state."""

    def __init__(self) -> None:
        self.subject: Subject
        self.step: Step
        self.device = "cpu"
        self.backward: bool | None = None
        self.held = 0

    def load(self, target: str, device: str, backward: bool | None) -> dict[str, Any]:
        """Import PyTorch, then the subject: seconds of each, and what sort of subject it is."""
        begin = time.perf_counter()
        import torch  # noqa: F401

        imported = time.perf_counter()
        self.subject = load_subject(target)
        loaded = time.perf_counter()
        self.device, self.backward = device, backward
        from ampcheck.core.environment import environment
        from ampcheck.speed.clock import clock_of
        from ampcheck.speed.steps import repeated
        from ampcheck.torchtools.copying import is_compiled_already

        self.clock = clock_of(device)  # refuses a device that is not there
        model = self.subject.model
        return {
            "imported": imported - begin,
            "loaded": loaded - imported,
            "name": self.subject.name,
            "own": self.subject.kind in (Kind.CALL, Kind.TRAINING) or is_compiled_already(self.subject),
            "blocks": len(repeated(model)) if hasattr(model, "modules") else 0,
            "varying": len({_shapes(call) for call in self.subject.calls}) > 1,
            "environment": environment(device),
        }

    def take(self, path: str) -> dict[str, Any]:
        """Load the artifacts that another process saved."""
        import torch

        data = Path(path).read_bytes()
        begin = time.perf_counter()
        info = torch.compiler.load_cache_artifacts(data)
        return {"artifacts_loaded": time.perf_counter() - begin, "taken": _count(info)}

    def start(self, way: Mapping[str, Any]) -> dict[str, Any]:
        """Build a step that runs this way, and run the first few."""
        from ampcheck.compiled.graph.recorder import GraphRecorder
        from ampcheck.compiled.graph.run import Passes
        from ampcheck.compiled.graph.trace import FIRST, LATE, WARM
        from ampcheck.speed.steps import EAGER, Way
        from ampcheck.torchtools.dynamo import (
            TraceRecord,
            compile_seconds,
            compile_trace,
            kernel_count,
            trace_unsupported,
        )

        chosen = Way(**way)
        if chosen.mode == EAGER:
            built, passes = self._run(chosen, [nullcontext] * PASSES)
            return {"built": built, "passes": passes}
        noting, heard = GraphRecorder(), list[TraceRecord]()

        def staged(stage: str) -> AbstractContextManager[None]:
            noting.log.stage = stage
            return nullcontext()

        before = _binaries()
        begin = time.perf_counter()
        with compile_trace(heard.append), noting.trace():  # these import Dynamo, which the user's own run does too
            listening = time.perf_counter() - begin
            built, passes = self._run(chosen, [partial(staged, stage) for stage in (FIRST, WARM, LATE)])
            with noting.profile():  # it slows Python down, so behind those that are timed
                self.step()
        told: dict[str, Any] = {"built": listening + built, "passes": passes}
        told.update(
            compiling=compile_seconds(), kernels=kernel_count(), off=_switched_off(), untold=trace_unsupported()
        )
        told["binaries"] = len(_binaries() - before)
        told["lookups"] = [one for record in heard if (one := _lookup(record.name, record.text)) is not None]
        if not told["untold"]:
            graph = noting.stats(self.subject.name, Passes(calls=PASSES + 1), device=self.device)
            told["graph"] = base64.b64encode(pickle.dumps(graph)).decode()
        return told

    def _run(self, way: Way, around: Sequence[Callable[[], AbstractContextManager[None]]]) -> tuple[float, list[float]]:
        """Seconds to build a step that runs this way, and of the first few."""
        from ampcheck.speed.memory import held_memory
        from ampcheck.speed.steps import step_of

        begin = time.perf_counter()
        self.step = step_of(self.subject, way, device=self.device, backward=self.backward)
        built, passes = time.perf_counter() - begin, []
        self.held = held_memory(self.device)  # the step's own copy of the weights lies there, and nothing else of it
        for context in around:
            with context():
                passes.append(self.clock.block(self.step, 1))
        return built, passes

    def save(self, path: str) -> dict[str, Any]:
        """Save what was compiled as artifacts."""
        import torch

        if not hasattr(torch.compiler, "save_cache_artifacts"):
            return {"save_untold": f"PyTorch {torch.__version__} has no torch.compiler.save_cache_artifacts (2.7 has)"}
        made = torch.compiler.save_cache_artifacts()
        if made is None:
            return {"saved": 0, "saved_bytes": 0}
        Path(path).write_bytes(made[0])
        return {"saved": _count(made[1]), "saved_bytes": len(made[0])}

    def memory(self) -> dict[str, Any]:
        """Peak memory of a step."""
        from ampcheck.speed.memory import peak_memory

        found = peak_memory(self.step, device=self.device, held=self.held if self.device != "cpu" else None)
        return {"memory": found.bytes, "memory_untold": found.reason}

    def pair(self, precision: str, seconds: float) -> dict[str, Any]:
        """The steady state beside an eager copy's, block by block."""
        from ampcheck.speed.paired import PairedMeasurement
        from ampcheck.speed.steps import Way, step_of

        eager = step_of(self.subject, Way(precision=precision), device=self.device, backward=self.backward)
        arms = {"eager": eager, "this": self.step}
        measurement = PairedMeasurement(arms, subject=self.subject.name, device=self.device)
        measurement.warm_up()
        measurement.run(seconds)
        stats = measurement.stats()
        return {"times": [[a.name, a.seconds, a.calls, a.first, a.clock] for a in (stats.reference, *stats.compared)]}


def _shapes(call: Any) -> tuple[Any, ...]:
    from ampcheck.torchtools.pytree import tensors

    return tuple(tuple(tensor.shape) for _, tensor in tensors((call.args, dict(call.kwargs))))


def _binaries() -> set[str]:
    """What C++ compilers made in Inductor's folder. Triton's is left out: what a cache holds is unpacked there."""
    folder, triton = (os.environ.get(name, "") for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"))
    found = Path(folder).rglob("*.so") if folder else ()
    return {str(path) for path in found if not (triton and path.is_relative_to(triton))}


def _count(info: Any) -> int:
    """How many artifacts a `CacheInfo` names."""
    groups = getattr(info, "artifacts", None) or {}
    return sum(len(keys) for keys in groups.values())


_CACHES = {"fx_graph_cache": "FX graph cache", "aotautograd_cache": "AOTAutograd cache"}


def _lookup(name: str, text: str) -> dict[str, Any] | None:
    """A record of the trace as a `Lookup`'s fields; a key's parts come as `[hash] name: value`."""
    cache, _, result = name.rpartition("_")
    if cache not in _CACHES:
        return None
    try:
        data = json.loads(text)
    except ValueError:
        data = {}
    parts = {}
    for part in data.get("components") or ():
        number, _, rest = str(part).partition("] ")
        label, _, value = rest.partition(": ")
        parts[label] = value if len(value) <= 60 else number.lstrip("[")
    reason = str(data.get("cache_bypass_reason") or "")
    return {"cache": _CACHES[cache], "result": result, "key": data.get("key") or "", "reason": reason, "parts": parts}


def _switched_off() -> list[str]:
    from ampcheck.torchtools.dynamo import setting

    found = []
    for name, off in (
        ("torch._inductor.config.force_disable_caches", True),
        ("torch._inductor.config.fx_graph_cache", False),
        ("torch._functorch.config.enable_autograd_cache", False),
    ):
        try:
            value = setting(name)
        except AttributeError:  # a release that has no such switch
            continue
        if value is off:
            found.append(f"{name} is {value}")
    return found
