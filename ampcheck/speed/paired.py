"""Paired measurement: all arms in turn, block by block, in random order, so that a disturbance affects all of them.

On a shared machine a time wanders by tens of per cent within minutes, and the ratio of two times taken within one tenth
of a second hardly at all. So each cycle times two blocks of every arm, in a new random order; an arm's time is their
geometric mean, and the statistic uses the ratios within the cycles. The difference of the two blocks of the reference
is noise, measured in the same minutes as the answer: its A/A twin.

All arms run equally often and are averaged alike. A reference that ran more often than the others would find its
weights in the cache more often, and the median of an average is not that of a single time where noise is skewed: both
made an equal arm look slower by up to a tenth.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from statistics import median

from ampcheck.core.arguments import parse_number
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError, as_result, brief, require_ran
from ampcheck.core.run import Scalar
from ampcheck.records.speed import KEYED, LOOKS, TWIN, ArmTimes, SpeedStats
from ampcheck.records.threads import Threads
from ampcheck.speed.clock import Clock, clock_of, summarised
from ampcheck.speed.threads import Account, fit_threads
from ampcheck.speed.verdict import paired_ratio
from ampcheck.torchtools.restore import restoring

BLOCK = 0.001
"""Seconds that a block should last, far above the clock's resolution; short blocks are disturbed less often."""

SHORT = 0.005
"""Seconds of a call up to which a block begins with an untimed one: refilling a cache would take part of its time."""

BUDGET = 10.0
"""Seconds of timed blocks by default."""

ENOUGH = 20
"""Cycles below which no interval counts as narrow."""

Step = Callable[[], object]
"""One step of an arm; what it returns is ignored."""


def fingerprint(device: str = "cpu") -> dict[str, Scalar]:
    """The hardware and the versions of this process. Imports torch."""
    known = environment(device)
    return {name: known[name] for name in KEYED if name in known}


@dataclass(slots=True)
class Arm:
    """One arm under measurement.

    calls: in a block; first: seconds of the first call of all; seconds: of one call; short: whether that is `SHORT`.
    """

    name: str
    step: Step
    calls: int = 1
    first: float = 0.0
    short: bool = False
    seconds: list[float] = field(default_factory=list)

    def warm_up(self, clock: Clock, block: float = BLOCK) -> None:
        """Call it at least three times and for 0.2 s, and set the calls in a block. Its first is timed apart."""
        self.first = self.first or clock.block(lambda: require_ran(self.step(), f"arm {self.name!r}"), 1)
        times: list[float] = []
        while len(times) < 3 or (sum(times) < 0.2 and len(times) < 1000):
            times.append(clock.block(self.step, 1))
        typical = median(times[len(times) // 2 :])
        self.calls = max(1, round(block / typical)) if typical > 0 else 1
        self.short = typical <= SHORT

    def block(self, clock: Clock) -> float:
        """Seconds of one block, which begins in the same cache state as every other."""
        clock.prepare(self.step if self.short else None)
        return clock.block(self.step, self.calls)

    def of_one_call(self, block: float) -> float:
        """Seconds of one call of a block; above zero even for a clock that does not advance, since its log is taken."""
        return max(block / self.calls, 1e-12)


class PairedMeasurement:
    """Arms that run in turn: `warm_up` once, `run` any number of times, `stats` at any time.

    arms: name to step, the first being the reference. block: seconds of one block, to the nearest whole call. threads:
    of PyTorch, if they were fitted to the load of the machine; None: `warm_up` does, and its caller restores them.
    """

    def __init__(
        self,
        arms: Mapping[str, Step],
        *,
        subject: str = "subject",
        device: str = "cpu",
        clock: Clock | None = None,
        block: float = BLOCK,
        seed: int = 0,
        threads: Threads | None = None,
    ) -> None:
        _require_arms(arms)
        self._clock = clock or clock_of(device)
        self._arms = [Arm(name, step) for name, step in arms.items()]
        self._twin: list[float] = []
        self._subject, self._device, self._block = subject, device, block
        self._random = Random(seed)
        self._conditions: list[dict[str, float]] = []
        self.spent = 0.0
        """Seconds in cycles so far."""
        self._threads, self._account = threads, Account(self._clock)

    def warm_up(self) -> None:
        """Warm up each arm, with as many threads as suit the first. Raises `UsageError` for an arm that raises."""
        for arm in self._arms:
            with naming(arm.name, self._subject):
                arm.warm_up(self._clock, self._block)
                if arm is self._arms[0] and self._threads is None:
                    self._threads = fit_threads(arm.step, self._clock)
                    if self._threads is not None and self._threads.used < self._threads.allowed:
                        arm.warm_up(self._clock, self._block)

    def run(self, until: float) -> None:
        """Run cycles until `until` seconds have passed in all of them, at least one. A cycle that raises is dropped."""
        self._conditions.append(self._clock.conditions())
        while True:
            begin = time.perf_counter()
            blocks: dict[str, list[float]] = {arm.name: [] for arm in self._arms}
            with without_collector(), self._account.adding():
                for arm in self._random.sample(2 * self._arms, 2 * len(self._arms)):
                    with naming(arm.name, self._subject):
                        blocks[arm.name].append(arm.block(self._clock))
            for arm in self._arms:
                # Which of the two came first is left to chance: a cycle begins a little slower than it ends.
                first, second = (arm.of_one_call(block) for block in self._random.sample(blocks[arm.name], 2))
                arm.seconds.append(math.sqrt(first * second))
                if arm is self._arms[0]:
                    self._twin.append(arm.seconds[-1] * (first / second) ** math.sqrt(0.5))
            self.spent += max(time.perf_counter() - begin, sum(map(sum, blocks.values())))
            if self.spent >= until:
                break
        self._conditions.append(self._clock.conditions())

    def stats(self) -> SpeedStats:
        """The measurement so far."""
        arms = [ArmTimes(arm.name, tuple(arm.seconds), arm.calls, arm.first) for arm in self._arms]
        threads = self._threads
        if threads is not None:
            threads = replace(threads, occupancy=self._account.occupancy(threads.used))
        return SpeedStats(
            subject=self._subject,
            arms=(arms[0], replace(arms[0], name=TWIN, seconds=tuple(self._twin)), *arms[1:]),
            fingerprint=fingerprint(self._device),
            conditions=summarised(self._conditions),
            spent=self.spent,
            threads=threads,
        )


@restoring
def measure_speed(
    arms: Mapping[str, Step],
    *,
    subject: str = "subject",
    device: str = "cpu",
    budget: float = BUDGET,
    width: float | None = 0.005,
    decided: Callable[[SpeedStats], bool] | None = None,
    clock: Clock | None = None,
    block: float = BLOCK,
    seed: int = 0,
    threads: Threads | None = None,
) -> SpeedStats:
    """Time two or more arms against the first, the reference, which also runs as its own A/A twin.

    arms: name to a callable without arguments, one step of the arm. budget: seconds of timed blocks, without warm-up
    and compilation. width: stop when the 95 per cent interval of every ratio is at most this share to each side;
    None for never. decided: called at each look, instead of `width`; True ends the measurement. threads: of
    `fit_threads`; None: as many of PyTorch's as suit the load of the machine while the reference warms up.

    Raises `UsageError` for fewer than two arms, an arm that raises, or a device that is not there.
    """
    parse_number(budget, "budget")
    measurement = PairedMeasurement(
        arms, subject=subject, device=device, clock=clock, block=block, seed=seed, threads=threads
    )
    measurement.warm_up()
    for share in LOOKS:
        if measurement.spent >= share * budget:  # one long cycle may pass several looks
            continue
        measurement.run(share * budget)
        stats = measurement.stats()
        if decided is not None:
            if decided(stats):
                return replace(stats, stopped="decided")
        elif width is not None and _narrow(stats, width):
            return replace(stats, stopped="narrow")
    return measurement.stats()


def _narrow(stats: SpeedStats, width: float) -> bool:
    return stats.cycles >= ENOUGH and all(paired_ratio(stats.reference, arm).width <= width for arm in stats.compared)


def _require_arms(arms: Mapping[str, Step]) -> None:
    if not isinstance(arms, Mapping) or len(arms) < 2:
        what = f"{len(arms)}" if isinstance(arms, Mapping) else type(arms).__name__
        raise UsageError(f"two or more arms are required, a mapping of names to callables; found {what}")
    for name, step in arms.items():
        if not isinstance(name, str) or not name or name == TWIN:
            raise UsageError(f"an arm's name is a text other than {TWIN!r}, the name of the reference's twin")
        if not callable(step):
            raise UsageError(f"arm {name!r} is a callable without arguments; found {type(step).__name__}")


@contextmanager
def naming(arm: str, subject: str) -> Iterator[None]:
    """Turn an exception of the user's code into a `UsageError` that names the arm."""
    try:
        yield
    except UsageError:
        raise
    except BaseException as error:  # the user's code
        raise UsageError(f"arm {arm!r} of {subject} raised {brief(as_result(error))}") from error


@contextmanager
def without_collector() -> Iterator[None]:
    """Switch Python's garbage collector off, where it is on, for one cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
