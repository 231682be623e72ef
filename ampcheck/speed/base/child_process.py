"""One launch of one side, in a worker: load the target, warm up, run one block at a time, count graphs and breaks."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ampcheck.core.run import Scalar
from ampcheck.core.subject import Kind, load_subject
from ampcheck.records.speed import COMPILED, EAGER, TARGET
from ampcheck.records.threads import Occupancy, Threads
from ampcheck.speed.base.checkout import loaded_modules, require_origin
from ampcheck.speed.base.stats import Signals
from ampcheck.speed.clock import Clock, clock_of
from ampcheck.speed.paired import Arm, fingerprint, naming, without_collector
from ampcheck.speed.steps import StepConfig, step_of
from ampcheck.speed.threads import Account, fit_threads
from ampcheck.torchtools import dynamo

if TYPE_CHECKING:
    from ampcheck.compiled.graph.recorder import GraphRecorder


class Launch:
    """A target in this process: `load` once, `warm_up` once, `block` any number of times."""

    def __init__(self) -> None:
        self._arms: dict[str, Arm] = {}
        self._clock: Clock
        self._account: Account
        self._device = "cpu"
        self._subject = ""
        self._recorder: GraphRecorder | None = None
        self._recording = ExitStack()
        self._unavailable = ""
        self._owns_threads = False

    def load(
        self,
        target: str,
        root: str,
        repository: str,
        device: str,
        mode: str | None,
        precision: str | None,
        threads: int | None = None,
    ) -> dict[str, Any]:
        """Import the target from `root` and call each arm once, which compiles it; return the arms.

        repository: the user's own checkout; nothing of it may be imported where `root` is another. Without one the
        origin of the target is not checked. threads: of PyTorch, None for its own number.
        """
        self._clock, self._device = clock_of(device), device
        self._account = Account(self._clock)
        if threads is not None:
            torch.set_num_threads(threads)
        subject = load_subject(target)
        self._subject = subject.name
        runs_itself = subject.kind in (Kind.CALL, Kind.TRAINING)
        self._owns_threads = device != "cpu" or runs_itself
        configs: dict[str, StepConfig | None] = {TARGET: None}
        if mode is not None or precision is not None:
            configs = {EAGER: StepConfig(EAGER, precision or "float32")}
            if mode not in (None, EAGER):
                configs[COMPILED] = StepConfig(mode or EAGER, precision or "float32")
        if COMPILED in configs or "torch._dynamo" in sys.modules or runs_itself:
            self._record_graphs()
        for name, config in configs.items():
            self._arms[name] = Arm(name, step_of(subject, config, device=device))
        with without_collector():
            for arm in self._arms.values():
                with naming(arm.name, self._subject):
                    self._clock.block(arm.step, 1)
        if repository:
            require_origin(target, Path(root), Path(repository))
        self._set_stage("WARM")
        return {"subject": self._subject, "arms": list(self._arms), "fingerprint": dict(fingerprint(device))}

    def modules(self, root: str, names: Collection[str]) -> dict[str, str]:
        """Imported modules, name to file: of the checkout, and by these top-level names."""
        return loaded_modules(Path(root), frozenset(names))

    def fit(self) -> Threads | None:
        """The number of threads that suits the load of the machine."""
        first = next(iter(self._arms.values()))
        with naming(first.name, self._subject):
            return fit_threads(first.step, self._clock)

    def pin(self, number: int) -> list[int]:
        """Pin the threads to as many cores as PyTorch uses, the same ones in every process of round `number`.

        The processes run one at a time, so that they can share cores; a process on a core which something else uses
        would otherwise be slow throughout the round, and the others fast. A target with threads or a device of its own,
        or one that uses all cores, is not pinned.
        """
        threads = torch.get_num_threads()
        if self._owns_threads or not hasattr(os, "sched_setaffinity"):
            return []
        allowed = sorted(os.sched_getaffinity(0))
        if threads >= len(allowed):
            return []
        cores = [allowed[(number * threads + offset) % len(allowed)] for offset in range(threads)]
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):  # it may have ended
                os.sched_setaffinity(int(thread), cores)
        return cores

    def warm_up(self) -> dict[str, int]:
        """Warm every arm up; return the calls of a block that each prefers."""
        for arm in self._arms.values():
            with naming(arm.name, self._subject):
                arm.warm_up(self._clock)
        self._set_stage("LATE")
        return {arm.name: arm.calls for arm in self._arms.values()}

    def block(self, order: Sequence[str], calls: Mapping[str, int]) -> dict[str, float]:
        """Seconds of one call of each arm, from one block of each, in this order."""
        seconds = {}
        with without_collector(), self._account.adding():
            for name in order:
                arm = self._arms[name]
                arm.calls = calls[name]
                with naming(name, self._subject):
                    seconds[name] = arm.of_one_call(arm.block(self._clock))
        return seconds

    def conditions(self) -> Mapping[str, Scalar]:
        """The load of the machine now."""
        return self._clock.conditions()

    def occupancy(self) -> Occupancy | None:
        """The use of the cores in all blocks."""
        return self._account.occupancy(torch.get_num_threads())

    def signals(self) -> Signals:
        """Graphs, breaks and recompilations so far."""
        if self._recorder is None:
            return Signals(self._unavailable)
        from ampcheck.compiled.graph.run import Passes

        stats = self._recorder.stats(self._subject, Passes(), device=self._device)
        breaks = [graph_break for graph_break in stats.breaks for _ in range(graph_break.times)]
        places = tuple((f"{each.where.file}:{each.where.line}", " ".join(each.reason.split())) for each in breaks)
        recompiles = tuple((each.frame, " ".join(each.guard.split())) for each in stats.recompiles)
        return Signals(stats.unsupported, len(stats.graphs), places, recompiles)

    def _record_graphs(self) -> None:
        """Record what Dynamo compiles from now on. A target that never compiles does not import it."""
        self._unavailable = dynamo.trace_unsupported()
        if not self._unavailable:
            from ampcheck.compiled.graph.recorder import GraphRecorder

            self._recorder = GraphRecorder()
            self._recording.enter_context(self._recorder.trace())

    def _set_stage(self, name: str) -> None:
        if self._recorder is not None:
            from ampcheck.compiled.graph import trace

            self._recorder.log.stage = getattr(trace, name)
