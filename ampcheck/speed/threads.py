"""The number of threads of a measurement on a CPU: fewer than the program's where other processes use the cores.

A parallel loop of PyTorch ends when its last thread does. Where another process keeps a core busy, that thread waits
for milliseconds to be scheduled, and the others wait for it: beside two busy processes on two cores, a step that one
thread computes in 1 ms took two threads 10 to 100 ms. A measurement then has a cycle or two in its budget. So where the
first calls get less CPU time than their threads could use, and the system interrupts them, the same calls are timed
with half as many threads, and so on; a smaller number is used if it is clearly faster. All arms run with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median

from ampcheck.core.run import Scalar
from ampcheck.records.threads import Occupancy, Threads
from ampcheck.speed.clock import Clock, Effort

GAIN = 1.25
"""Speed of a smaller number of threads, relative to all, from which it is used."""

_CALLS, _SECONDS = 3, 0.1
"""Calls of a probe, at least, and seconds."""


def meanwhile(conditions: Mapping[str, Scalar], threads: Threads | None) -> dict[str, Scalar]:
    """Conditions of the machine during a measurement, for `Run.environment`."""
    values = {} if threads is None else threads.environment()
    return values | {f"meanwhile: {name}": value for name, value in conditions.items()}


class Account:
    """The use of the CPU during some blocks of code."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._cpu, self._switches, self._wall = 0.0, 0, 0.0

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Add this block."""
        before, begin = self._clock.effort(), time.perf_counter()
        yield
        if before is not None and (after := self._clock.effort()) is not None:
            self.add(before, after, time.perf_counter() - begin)

    def add(self, before: Effort, after: Effort, wall: float) -> None:
        """Add what lies between two moments that are `wall` seconds apart."""
        self._cpu += after.cpu - before.cpu
        self._switches += after.switches - before.switches
        self._wall += wall

    def occupancy(self, used: int, seconds: float = 0.0) -> Occupancy | None:
        """Of all blocks together, with `used` threads; None where there is none."""
        wall = self._wall
        return Occupancy(used, self._cpu / wall, self._switches / wall, seconds) if wall > 0 else None


def fit_threads(step: Callable[[], object], clock: Clock) -> Threads | None:
    """Set PyTorch's threads to a number that suits the load of the machine, and return it.

    step: of the reference, which has run before. None where the clock does not measure the CPU. The caller restores the
    number (`restored`). Compiled code is compiled for a number of threads: call this before anything is compiled.
    """
    if clock.effort() is None:
        return None
    import torch

    allowed: int = torch.get_num_threads()

    def probe(count: int) -> Occupancy:
        torch.set_num_threads(count)
        return _probe(step, clock, count)

    chosen = choose(probe, allowed)
    torch.set_num_threads(chosen.used)
    return chosen


def choose(probe: Callable[[int], Occupancy], allowed: int) -> Threads:
    """The fastest of `allowed` threads, half as many, and so on; no smaller number is tried where cores are free."""
    if allowed == 1:
        return Threads(1, 1)
    first = best = now = probe(allowed)
    while now.crowded and now.used > 1:
        now = probe(now.used // 2)
        if now.seconds * GAIN <= best.seconds:
            best = now
    return Threads(best.used, allowed, first.seconds / best.seconds if best is not first else 1.0)


def _probe(step: Callable[[], object], clock: Clock, threads: int) -> Occupancy:
    clock.block(step, 1)  # starts or ends threads, and compiles again what was compiled for another number
    times: list[float] = []
    account, before = Account(clock), clock.effort()
    while len(times) < _CALLS or sum(times) < _SECONDS:
        times.append(clock.block(step, 1))
    after = clock.effort()
    if before is not None and after is not None:
        account.add(before, after, sum(times))
    return account.occupancy(threads, median(times)) or Occupancy(threads, float(threads), 0.0, median(times))
