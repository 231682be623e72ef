"""One launch of one side, in a worker: load the target, warm up, run one block at a time, tell what Dynamo told."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from ampcheck.core.subject import Kind, load_subject
from ampcheck.speed.base.origin import loaded_modules, require_origin
from ampcheck.speed.base.stats import AS_IT_IS, COMPILED, EAGER
from ampcheck.speed.clock import Clock, clock_of
from ampcheck.speed.fingerprint import fingerprint
from ampcheck.speed.paired import Arm, naming, without_collector
from ampcheck.speed.steps import Way, step_of


def commands() -> dict[str, Callable[..., Any]]:
    """What a launch can be asked."""
    launch = Launch()
    return {
        "load": launch.load,
        "modules": launch.modules,
        "settle": launch.settle,
        "warm_up": launch.warm_up,
        "block": launch.block,
        "conditions": launch.conditions,
        "signals": launch.signals,
    }


class Launch:
    """A target in this process. `load` once, `warm_up` once, `block` as often as one likes."""

    def __init__(self) -> None:
        self._arms: dict[str, Arm] = {}
        self._clock: Clock
        self._device = "cpu"
        self._subject = ""
        self._noting: Any = None
        self._listening = ExitStack()
        self._untold = ""
        self._owns_threads = False

    def load(
        self,
        target: str,
        root: str,
        repository: str,
        device: str,
        mode: str | None,
        precision: str | None,
    ) -> dict[str, Any]:
        """Import the target from `root`, call each arm once (which compiles), and tell the arms.

        repository: the user's own checkout; nothing of it may be imported where `root` is another.
        """
        self._clock, self._device = clock_of(device), device
        subject = load_subject(target)
        self._subject = subject.name
        self._owns_threads = device != "cpu" or subject.kind in (Kind.CALL, Kind.TRAINING)
        ways = _ways(mode, precision)
        if COMPILED in ways or "torch._dynamo" in sys.modules or subject.kind in (Kind.CALL, Kind.TRAINING):
            self._listen()
        for name, way in ways.items():
            self._arms[name] = Arm(name, step_of(subject, way, device=device))
        with without_collector():
            for arm in self._arms.values():
                with naming(arm.name, self._subject):
                    self._clock.block(arm.step, 1)
        require_origin(target, Path(root), Path(repository))
        self._stage("WARM")
        return {"subject": self._subject, "arms": list(self._arms), "fingerprint": dict(fingerprint(device))}

    def modules(self, root: str, names: Collection[str]) -> dict[str, str]:
        """What was imported so far, module to file: of the checkout, and by these top-level names."""
        return loaded_modules(Path(root), frozenset(names))

    def settle(self, number: int) -> list[int]:
        """Keep to as many cores as PyTorch uses threads, the same ones in every process of round `number`.

        The processes run one at a time, so that they can share them; a process that stays on a core which something
        else uses too would otherwise be slow throughout the round, and its neighbour fast. What has threads or a device
        of its own, or uses all cores, is left alone.
        """
        threads = torch.get_num_threads()
        if self._owns_threads or not hasattr(os, "sched_setaffinity"):
            return []
        allowed = sorted(os.sched_getaffinity(0))
        if threads >= len(allowed):
            return []
        chosen = [allowed[(number * threads + one) % len(allowed)] for one in range(threads)]
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):  # one that ended meanwhile
                os.sched_setaffinity(int(thread), chosen)
        return chosen

    def warm_up(self) -> dict[str, int]:
        """Warm every arm up; how many calls it would put into a block."""
        for arm in self._arms.values():
            with naming(arm.name, self._subject):
                arm.warm_up(self._clock)
        self._stage("LATE")
        return {arm.name: arm.calls for arm in self._arms.values()}

    def block(self, order: Sequence[str], calls: Mapping[str, int]) -> dict[str, float]:
        """Seconds of one call of each arm, from one block of each, in this order."""
        taken = {}
        with without_collector():
            for name in order:
                arm = self._arms[name]
                arm.calls = calls[name]
                with naming(name, self._subject):
                    taken[name] = arm.of_one_call(arm.block(self._clock))
        return taken

    def conditions(self) -> dict[str, float]:
        """What the machine does now."""
        return self._clock.conditions()

    def signals(self) -> dict[str, Any]:
        """What Dynamo has told so far: graphs, breaks, recompilations."""
        if self._noting is None:
            return {"untold": self._untold}
        from ampcheck.compiled.graph.run import Passes

        stats = self._noting.stats(self._subject, Passes(), device=self._device)
        met = [one for one in stats.breaks for _ in range(one.times)]
        return {
            "untold": stats.unsupported,
            "graphs": len(stats.graphs),
            "ops": sum(graph.ops for graph in stats.graphs),
            "breaks": [[f"{one.where.file}:{one.where.line}", " ".join(one.reason.split())] for one in met],
            "recompiles": [[one.frame, " ".join(one.guard.split())] for one in stats.recompiles],
        }

    def _listen(self) -> None:
        """Hear what Dynamo tells from now on. What never compiles does without, and without importing it."""
        from ampcheck.torchtools.dynamo import trace_unsupported

        self._untold = trace_unsupported()
        if not self._untold:
            from ampcheck.compiled.graph.recorder import GraphRecorder

            self._noting = GraphRecorder()
            self._listening.enter_context(self._noting.trace())

    def _stage(self, name: str) -> None:
        if self._noting is not None:
            from ampcheck.compiled.graph import trace

            self._noting.log.stage = getattr(trace, name)


def _ways(mode: str | None, precision: str | None) -> dict[str, Way | None]:
    if mode is None and precision is None:
        return {AS_IT_IS: None}
    known = precision or "float32"
    if mode is None or mode == EAGER:
        return {EAGER: Way(EAGER, known)}
    return {EAGER: Way(EAGER, known), COMPILED: Way(mode, known)}
