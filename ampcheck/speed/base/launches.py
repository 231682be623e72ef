"""The statistic of several launches: what differs from process to process is not the code's doing.

A compiled model runs 2 to 3 per cent faster or slower from one launch of the same code to the next (where its memory
lies, mostly), and the blocks inside one launch all share that luck: a thousand of them are one observation. So
the rounds are counted and not the blocks. Let a round launch the base, its twin and the head, and let

    d = median over its cycles of (log base + log twin) / 2 - log head       above 0 the head is faster
    a = median over its cycles of  log base - log twin                       0 but for luck

where each process carries luck of variance s^2: the launch's own plus what is left of the noise of its blocks. Then

- d is the better for using both: its variance is 3/2 s^2, where one of them alone would leave 2 s^2;
- d and a are uncorrelated, cov((b + t) / 2, b - t) = (var b - var t) / 2 = 0, so both tell of s^2 independently;
- a is known to be 0 in the mean and spends no degree of freedom on it: with R rounds, the sum of a^2 / 2 and of
  (d - mean d)^2 / (3/2) together are s^2 times a chi-square of R + (R - 1) = 2 R - 1 degrees of freedom.

The interval is that of Student's t with 2 R - 1 degrees of freedom: mean d -+ t * sqrt(3/2 s^2 / R). Nothing is assumed
of how noisy a block is: what it adds is in d and a. Two things are assumed of launches, that they are independent and
that their luck is about normal, and one more, that the head's is no wilder than the base's, is guarded: s^2 is never
taken for less than the d alone show. The simulation in tests/speed/test_base_launches.py shows what that is worth.
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

_OF_DIFFERENCE, _OF_TWIN = 1.5, 2.0
"""Variance of d and of a, in variances of one process."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """d and a of each round, float64 [rounds]: logarithms, of base over head and of base over twin."""

    head: NDArray[np.float64]
    twin: NDArray[np.float64]


def rounds_of(turns: Sequence[Turns]) -> Rounds:
    """The rounds of one arm."""
    head, twin = [], []
    for one in turns:
        base, again, changed = (np.log(np.asarray(seconds)) for seconds in (one.base, one.twin, one.head))
        head.append(float(np.median((base + again) / 2 - changed)))
        twin.append(float(np.median(base - again)))
    return Rounds(np.asarray(head), np.asarray(twin))


def luck(rounds: Rounds) -> float:
    """s: the standard deviation of one process, as a share of its time; infinite for a single round."""
    number = len(rounds.head)
    if number < 2:
        return math.inf
    of_head = float(((rounds.head - rounds.head.mean()) ** 2).sum()) / _OF_DIFFERENCE
    of_twin = float((rounds.twin**2).sum()) / _OF_TWIN
    return math.sqrt(max((of_head + of_twin) / (2 * number - 1), of_head / (number - 1)))


def bounds(rounds: Rounds, confidence: float) -> tuple[float, float]:
    """The interval of mean d, logarithms."""
    reach, middle = _reach(rounds, confidence, _OF_DIFFERENCE), float(rounds.head.mean())
    return middle - reach, middle + reach


def twin_noise(rounds: Rounds) -> float:
    """How far the 95 per cent interval of mean a reaches from a ratio of 1, as a share."""
    return math.expm1(min(abs(float(rounds.twin.mean())) + _reach(rounds, CONFIDENCE, _OF_TWIN), 700.0))


def decide_rounds(rounds: Rounds, rule: Rule) -> Decision:
    """Judge the head; the ratio is base seconds / head seconds, above 1 where the head is faster."""
    low, high = bounds(rounds, rule.confidence)
    found = math.exp(rounds.head.mean())
    bias = math.expm1(min(abs(float(rounds.twin.mean())), 700.0))
    return conclude(found, math.exp(low), math.exp(min(high, 700.0)), rule, noise=twin_noise(rounds), bias=bias)


def look_points(launches: int, most: int, looks: int) -> tuple[int, ...]:
    """After which rounds to look: at `launches`, at `most`, and between them so that each adds its share.

    At most `looks` of them: each look may err, and the rule's confidence pays for so many.
    """
    between = np.geomspace(launches, most, looks)
    return tuple(sorted({launches, most, *(round(point) for point in between)}))


def _reach(rounds: Rounds, confidence: float, variance: float) -> float:
    number, deviation = len(rounds.head), luck(rounds)
    if math.isinf(deviation):
        return math.inf
    from scipy import stats as statistics  # takes a second to import, which only a verdict needs

    quantile = float(statistics.t.ppf((1 + confidence) / 2, 2 * number - 1))
    return quantile * deviation * math.sqrt(variance / number)
