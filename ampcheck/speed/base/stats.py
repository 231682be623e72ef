"""Figures of a comparison of two revisions, and their statistic.

A compiled model runs 2 to 3 per cent faster or slower from one launch of the same code to the next (mostly by where its
memory lies), and all blocks of a launch share that offset: a thousand of them are one observation. So rounds are
counted and not blocks. A round launches the base, its twin and the head, and gives

    d = median over its cycles of (log base + log twin) / 2 - log head       above 0 the head is faster
    a = median over its cycles of  log base - log twin                       0 in the mean

where each process has an offset of variance s^2. Then d has a variance of 3/2 s^2, a one of 2 s^2; both are
uncorrelated, and the mean of a is known, so that with R rounds the sum of a^2 / 2 and of (d - mean d)^2 / (3/2) is s^2
times a chi-square of 2 R - 1 degrees of freedom. The interval is that of Student's t with as many: mean d -+ t *
sqrt(3/2 s^2 / R). Launches are assumed to be independent with about normal offsets; blocks may be noisy in any way. A
head that varies more than the base is guarded against: s^2 is at least the estimate of the d alone.
tests/units/speed/test_base_launches.py simulates it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ampcheck.core.git import Side
from ampcheck.core.run import Scalar
from ampcheck.records.speed import BASE, EAGER, LAUNCHES, TARGET, Decision, Rule
from ampcheck.records.threads import Threads
from ampcheck.speed.verdict import CONFIDENCE, conclude


@dataclass(frozen=True, slots=True)
class Turns:
    """One arm in one round: seconds of one call on each side, one value for each cycle; the cycles correspond."""

    base: tuple[float, ...]
    twin: tuple[float, ...]
    head: tuple[float, ...]
    calls: int = 1

    @property
    def cycles(self) -> int:
        """Blocks of each side."""
        return len(self.base)


@dataclass(frozen=True, slots=True)
class Signals:
    """Counts of Dynamo on one side, which do not depend on how busy the machine is.

    unavailable: why there are none. breaks: (location, reason), once for each time. recompiles: (function, guard).
    """

    unavailable: str = ""
    graphs: int = 0
    breaks: tuple[tuple[str, str], ...] = ()
    recompiles: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class BaseStats:
    """The head against a base, over several rounds, each of which launches all sides.

    arms: names; the last is judged, an `eager` before it is the reference of its speedup. rounds: arm to its `Turns`.
    signals: of base and head. failure: why the base could not run. notes: for the reader. idle: that no file that
    differs was imported, if so. settings: the target with device, mode and precision, which identifies a comparison.
    threads: of every side; None where a device computes.
    """

    subject: str
    base: Side
    head: Side
    arms: tuple[str, ...] = (TARGET,)
    rounds: tuple[Mapping[str, Turns], ...] = ()
    signals: Mapping[str, Signals] = field(default_factory=dict)
    fingerprint: Mapping[str, Scalar] = field(default_factory=dict)
    conditions: Mapping[str, Scalar] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    failure: str = ""
    spent: float = 0.0
    stopped: str = LAUNCHES
    idle: str = ""
    settings: str = ""
    threads: Threads | None = None

    @property
    def judged(self) -> str:
        """The arm that is judged."""
        return self.arms[-1]

    def turns(self, arm: str) -> list[Turns]:
        """Of an arm, one for each round."""
        return [turns[arm] for turns in self.rounds]

    @property
    def cycles(self) -> int:
        """Paired cycles of all rounds."""
        return sum(turns.cycles for turns in self.turns(self.judged))

    def seconds(self, arm: str, side: str) -> float:
        """Seconds of the typical call of an arm on a side; for tables, never for a verdict."""
        return median(median(turns.base if side == BASE else turns.head) for turns in self.turns(arm))

    def speedup(self, side: str) -> float:
        """Return how many times faster than eager mode the judged arm is on a side; from medians, for tables."""
        return self.seconds(EAGER, side) / self.seconds(self.judged, side)


_VARIANCE_D, _VARIANCE_A = 1.5, 2.0
"""In variances of one process."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """d and a of each round, float64 [rounds]: logarithms, of base over head and of base over twin."""

    head: NDArray[np.float64]
    twin: NDArray[np.float64]


def rounds_of(turns: Sequence[Turns]) -> Rounds:
    """The rounds of one arm."""
    head, twin = [], []
    for each in turns:
        base, again, changed = (np.log(np.asarray(seconds)) for seconds in (each.base, each.twin, each.head))
        head.append(float(np.median((base + again) / 2 - changed)))
        twin.append(float(np.median(base - again)))
    return Rounds(np.asarray(head), np.asarray(twin))


def launch_deviation(rounds: Rounds) -> float:
    """s: the standard deviation of one process, as a share of its time; infinite for a single round."""
    number = len(rounds.head)
    if number < 2:
        return math.inf
    of_head = float(((rounds.head - rounds.head.mean()) ** 2).sum()) / _VARIANCE_D
    of_twin = float((rounds.twin**2).sum()) / _VARIANCE_A
    return math.sqrt(max((of_head + of_twin) / (2 * number - 1), of_head / (number - 1)))


def bounds(rounds: Rounds, confidence: float) -> tuple[float, float]:
    """The interval of mean d, logarithms."""
    reach, middle = _reach(rounds, confidence, _VARIANCE_D), float(rounds.head.mean())
    return middle - reach, middle + reach


def twin_noise(rounds: Rounds) -> float:
    """Return how far the 95 per cent interval of mean a reaches from a ratio of 1, as a share."""
    return math.expm1(min(abs(float(rounds.twin.mean())) + _reach(rounds, CONFIDENCE, _VARIANCE_A), 700.0))


def decide_rounds(rounds: Rounds, rule: Rule) -> Decision:
    """Judge the head; the ratio is base seconds / head seconds, above 1 where the head is faster."""
    low, high = bounds(rounds, rule.confidence)
    bias = math.expm1(min(abs(float(rounds.twin.mean())), 700.0))
    ratio, ends = math.exp(rounds.head.mean()), (math.exp(low), math.exp(min(high, 700.0)))
    return conclude(ratio, *ends, rule, noise=twin_noise(rounds), bias=bias)


def look_points(launches: int, most: int, looks: int) -> tuple[int, ...]:
    """After which rounds to look: at most `looks`, for which the rule's confidence pays, spaced geometrically."""
    between = np.geomspace(launches, most, looks)
    return tuple(sorted({launches, most, *(round(point) for point in between)}))


def _reach(rounds: Rounds, confidence: float, variance: float) -> float:
    number, deviation = len(rounds.head), launch_deviation(rounds)
    if math.isinf(deviation):
        return math.inf
    return student_quantile((1 + confidence) / 2, 2 * number - 1) * deviation * math.sqrt(variance / number)


def student_quantile(probability: float, freedom: int) -> float:
    """Student's t with an odd number of degrees of freedom that is exceeded with a probability of 1 - `probability`.

    probability: between 0.5 and 1. By bisection of the angle atan(t / sqrt(freedom)), of which the distribution is a
    finite sum (Abramowitz and Stegun, 26.7.3).
    """
    low, high = 0.0, math.pi / 2
    while low < (angle := (low + high) / 2) < high:
        low, high = (angle, high) if _within(angle, freedom) < 2 * probability - 1 else (low, angle)
    return math.tan(low) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """The probability of a smaller absolute t."""
    power, total = math.cos(angle), 0.0
    for even in range(2, freedom, 2):
        total += power
        power *= math.cos(angle) ** 2 * even / (even + 1)
    return (angle + math.sin(angle) * total) * 2 / math.pi
