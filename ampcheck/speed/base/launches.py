"""The statistic of several launches, each of which runs one code a little faster or slower than the last.

A compiled model runs 2 to 3 per cent faster or slower from one launch of the same code to the next (mostly by where its
memory lies), and all blocks of a launch share that offset: a thousand of them are one observation. So rounds are
counted and not blocks. A round launches the base, its twin and the head, and gives

    d = median over its cycles of (log base + log twin) / 2 - log head       above 0 the head is faster
    a = median over its cycles of  log base - log twin                       0 in the mean

where each process has an offset of variance s^2: the launch's own plus the rest of the noise of its blocks. Then

- d is better for using both: its variance is 3/2 s^2, and 2 s^2 with one of them alone;
- d and a are uncorrelated, cov((b + t) / 2, b - t) = (var b - var t) / 2 = 0, so both estimate s^2 independently;
- the mean of a is known to be 0 and costs no degree of freedom: with R rounds, the sum of a^2 / 2 and of
  (d - mean d)^2 / (3/2) is s^2 times a chi-square of R + (R - 1) = 2 R - 1 degrees of freedom.

The interval is that of Student's t with 2 R - 1 degrees of freedom: mean d -+ t * sqrt(3/2 s^2 / R). Launches are
assumed to be independent with about normal offsets; blocks may be noisy in any way. A head that varies more than the
base is guarded against: s^2 is at least the estimate of the d alone. tests/speed/test_base_launches.py simulates it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampcheck.speed.base.stats import Turns
from ampcheck.speed.interval import CONFIDENCE
from ampcheck.speed.verdict import Decision, Rule, conclude

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
    """How far the 95 per cent interval of mean a reaches from a ratio of 1, as a share."""
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
    from scipy import stats as statistics  # takes a second to import, which only a verdict needs

    quantile = float(statistics.t.ppf((1 + confidence) / 2, 2 * number - 1))
    return quantile * deviation * math.sqrt(variance / number)
