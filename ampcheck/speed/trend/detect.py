"""Steps in a series of log-ratios: a sequential detector, wrong on at most 1 per cent of series of 60 points.

The model. Point i is `a + b * i + noise`, the noise being exchangeable: normal, with heavy tails, or from several
machines, each point from one of them by chance. `b` is a slow drift, of the machine, of its kernel, of its neighbours,
and is no step. A step is a change of `a` that stays.

The statistic. Whenever a point arrives, the last 50 (`WINDOW`) since the last change are judged: a Theil-Sen line
removes drift, the residuals are divided by their median absolute deviation and clipped at 4 (`CLIP`), so that no
single run outweighs all others. With s these scores, and c the indicator of the last k points, both with their
projection on a line removed, the statistic is the score test of a step under a permutation's variance,

    z_k = sum(c * s) / sqrt(sum(c * c) * sum(s * s) / (n - 2)),    k = 5, 8, 12.

It is invariant to shifting, scaling and shearing the series (any a, any linear b, any unit of noise), so that its
distribution depends on the noise's shape alone. A step is detected when |z_k| exceeds `HEIGHTS[k]`, moved as Cornish
and Fisher's expansion moves a quantile of the normal distribution: by the skewness and the kurtosis that z_k has when
the scores are permuted. So heavy tails raise the height where they are, and normal noise does not pay for them. The
medians of the k points and the 15 before them must differ by the minimum effect, too. Then the segment ends and the
next begins at the step. A detected step stays, since no later point is used.

Two guards only remove steps. A drift that bends is no step: where a parabola explains the scores better than the step
does, none is detected. And where neighbours are correlated by r before the step (a machine is busy for days), a mean of
them varies by (1 + r) / (1 - r) more, and z_k is divided by the root of that.

The heights are those that at most 1 % of simulated series of 60 points exceed anywhere, every prefix judged, under
eleven shapes of noise, with the guards. Falls after k = 5 have most of that: a slowdown is warned of, and should be
found in five points. `benchmarks/bench_trend.py` repeats this with another seed, measures false alarms and power with
all parts on, and shows the limits of the model: drift that bends by several per cent within weeks, and levels that
wander by more than a tenth of their noise per point, are steps.

With a noise of 2 % (standard deviation of one log-ratio) this finds a fall of 5 % after 40 points within five in 72 %.
No detector that allows for a drift finds it in 90 % at the same rate of alarms: the most powerful test beside a line,
which knows the noise to be normal, finds 77 % (`benchmarks/trend_bound.py`). With 1.25 % of noise nearly all are found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ampcheck.core.errors import UsageError
from ampcheck.records.history import Change

Floats: TypeAlias = NDArray[np.float64]

WINDOW = 50
"""The most points in one test: a drift is straight over so many."""

BEFORE = 15
"""Points of a segment before the earliest step that can be detected."""

HEIGHTS = {5: (3.3, 3.6), 8: (3.8, 3.9), 12: (3.8, 3.9)}
"""Points after a step, and the heights of their statistic that detect a fall and a rise in normal noise. A fall is a
slowdown, which is warned of, and may make three of four false alarms."""

ALIKE = 1.3
"""Standard errors that the correlation of neighbours must exceed to count: one in ten does by chance."""

LOWER = 0.3
"""By how much the noise's shape lowers a height at most: two moments do not describe every shape."""

CLIP = 4.0
"""Median absolute deviations at which scores are clipped."""

EFFECT = 0.02
"""The smallest step that is reported, as a share."""

LEAST = BEFORE + min(HEIGHTS)
"""Points below which a segment is not judged."""

NEAR = 20
"""Points on each side from which the size of a step is estimated: nearer than a drift."""

CONFIDENCE = 0.95

_MAD = NormalDist().inv_cdf(0.75)
"""The median absolute deviation of the standard normal distribution."""


def change_points(ratios: Sequence[float], *, effect: float = EFFECT) -> list[Change]:
    """The steps of a series of positive ratios [n], in the order in which they were measured.

    effect: the smallest step that is reported, as a share. Fewer than 20 points have no steps. Raises `UsageError` for
    a ratio that is not positive and finite.
    """
    values = np.asarray(list(ratios), dtype=np.float64)
    if values.size and not (np.isfinite(values).all() and values.min() > 0):
        raise UsageError("a trend needs positive, finite ratios; filter out the others")
    if not 0 <= effect < 1:
        raise UsageError(f"effect must be a share between 0 and 1, such as 0.02; found {effect!r}")
    logs: Floats = np.log(values)
    starts, detected = [0], list[int]()
    for end in range(1, len(logs) + 1):
        begin = max(starts[-1], end - WINDOW)
        if end - begin < LEAST:
            continue
        if after := int(alarms(logs[None, begin:end], effect=effect)[0]):
            starts.append(_most_likely(logs, begin, end, after))
            detected.append(end - 1)
    ends = [*starts[2:], len(logs)]
    return [_described(logs, *step) for step in zip(starts, starts[1:], ends, detected, strict=False)]


def alarms(windows: Floats, *, effect: float = EFFECT) -> NDArray[np.int64]:
    """Return how many points come after a step near the end of each window of log-ratios, float64 [series, points], of
    at least 20 points; 0 where there is none: int64 [series]."""
    count = windows.shape[1]
    afters = [k for k in HEIGHTS if k + BEFORE <= count]
    z = step_statistics(windows, afters)
    medians = [(np.median(windows[:, -k:], axis=1), np.median(windows[:, -k - BEFORE : -k], axis=1)) for k in afters]
    shifts = np.stack([after - before for after, before in medians], axis=1)
    heights = heights_of(z, afters)
    loud = (np.abs(z) > heights) & (shifts * np.sign(z) >= math.log1p(effect))
    excess = np.where(loud, np.abs(z) / heights, 0.0)
    after = np.where(loud.any(axis=1), np.asarray(afters)[excess.argmax(axis=1)], 0)
    return after.astype(np.int64)


def step_statistics(windows: Floats, afters: Sequence[int]) -> Floats:
    """z_k of windows, float64 [series, points], for each number of points after the step: float64 [series, afters].

    In units in which `HEIGHTS` are those of any noise, and with the two guards: 0 where a bend explains more, less
    where neighbours are correlated.
    """
    z, bend, correlation = unguarded_statistics(windows, afters)
    return np.where(np.abs(z) > bend, z * np.sqrt((1 - correlation) / (1 + correlation)), 0.0)


def unguarded_statistics(windows: Floats, afters: Sequence[int]) -> tuple[Floats, Floats, Floats]:
    """z_k without guards, |z| of a bend, and the correlation of neighbours: [series, afters] or [series, 1] each."""
    count = windows.shape[1]
    line, (first, second) = _centred(count), _pairs(count)
    slopes = np.median((windows[:, second] - windows[:, first]) / (second - first), axis=1)
    residuals = windows - slopes[:, None] * line
    residuals -= np.median(residuals, axis=1, keepdims=True)
    spread = np.median(np.abs(residuals), axis=1, keepdims=True) / _MAD
    scores = _without_line(np.clip(residuals / np.maximum(spread, 1e-12), -CLIP, CLIP))
    squares = (scores**2).sum(axis=1, keepdims=True)
    scores = scores / np.sqrt(np.where(squares > 1e-9, squares, np.inf))
    steps = _steps(count, tuple(afters))
    z = math.sqrt(count - 2) * (scores @ steps.T)
    bend = math.sqrt(count - 2) * np.abs(scores @ _bend(count))[:, None]
    heights = heights_of(z, afters)
    z *= heights / _quantiles(heights, scores, steps, np.sign(z))
    return z, bend, np.stack([_correlation(scores[:, : count - k]) for k in afters], axis=1)


def heights_of(z: Floats, afters: Sequence[int]) -> Floats:
    """The heights of a fall where z is negative, of a rise elsewhere: float64 [series, afters]."""
    falls, rises = np.array([HEIGHTS[k] for k in afters]).T
    return np.asarray(np.where(z < 0, falls, rises))


def _quantiles(heights: Floats, scores: Floats, steps: Floats, signs: Floats) -> Floats:
    """The quantiles of z under permutation that `heights` are of a normal distribution: float64 [series, afters].

    Cornish and Fisher's expansion, of the skewness and the kurtosis of a sum of unit vectors in random order.
    """
    count = scores.shape[1]
    skewness = (steps**3).sum(axis=1) * (scores**3).sum(axis=1, keepdims=True) * signs
    skewness *= count * math.sqrt(count - 1) / (count - 2)
    kurtosis = (count * (steps**4).sum(axis=1) - 3) * (count * (scores**4).sum(axis=1, keepdims=True) - 3) / count
    cubed = heights**3
    moved = skewness / 6 * (heights**2 - 1) + kurtosis / 24 * (cubed - 3 * heights)
    moved -= skewness**2 / 36 * (2 * cubed - 5 * heights)
    return np.asarray(np.maximum(heights + moved, heights - LOWER))


def _correlation(scores: Floats) -> Floats:
    """The correlation of each score before the step with the next, 0 where chance explains it."""
    before = _without_line(scores)
    count = before.shape[1]
    squares = np.maximum((before**2).sum(axis=1), 1e-9)
    correlation = (before[:, 1:] * before[:, :-1]).sum(axis=1) / squares
    unbiased = (count * correlation + 2) / (count - 4)  # a line that is removed takes (2 + 4 r) / n of it
    return np.where(correlation > ALIKE / math.sqrt(count), np.clip(unbiased, 0.0, 0.9), 0.0)


@cache
def _centred(count: int) -> Floats:
    return np.arange(count, dtype=np.float64) - (count - 1) / 2


@cache
def _pairs(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.triu_indices(count, 1)


@cache
def _steps(count: int, afters: tuple[int, ...]) -> Floats:
    """Unit vectors of a step before the last k points, without what a line explains: float64 [afters, points]."""
    steps = _without_line(np.array([(np.arange(count) >= count - k) * 1.0 for k in afters]))
    return np.asarray(steps / np.linalg.norm(steps, axis=1, keepdims=True))


@cache
def _bend(count: int) -> Floats:
    """The unit vector of a parabola, without what a line explains: float64 [points]."""
    bend = _without_line(_centred(count)[None] ** 2)[0]
    return np.asarray(bend / np.linalg.norm(bend))


def _without_line(rows: Floats) -> Floats:
    line = _centred(rows.shape[1])
    rows = rows - rows.mean(axis=1, keepdims=True)
    return np.asarray(rows - (rows @ line / (line @ line))[:, None] * line)


def _most_likely(logs: Floats, begin: int, end: int, after: int) -> int:
    """The first changed point, of those that leave both sides long enough."""
    candidates, costs = _likelihoods(logs, begin, end, end - after)
    return int(candidates[costs.argmin()])


def _likelihoods(logs: Floats, begin: int, end: int, about: int) -> tuple[NDArray[np.int64], Floats]:
    """Candidates for the first changed point around `about`, and minus the log-likelihood of each.

    Huber's loss around the median of each side, the noise being that of both sides.
    """
    reach = 6
    low, high = max(begin + 3, about - reach), min(end - 3, about + reach)
    candidates = np.arange(low, max(high, low) + 1)
    near = slice(max(begin, about - NEAR), min(end, about + NEAR))
    sides = [np.split(logs[near], [candidate - near.start]) for candidate in candidates]
    residuals = [np.abs(np.concatenate([side - np.median(side) for side in both])) for both in sides]
    spread = min(float(np.median(residual)) for residual in residuals) / _MAD
    costs = [huber(residual / max(spread, 1e-12)).sum() for residual in residuals]
    return candidates, np.minimum(np.asarray(costs), 1e12)


def huber(residuals: Floats) -> Floats:
    """Huber's loss of absolute residuals: half the square up to `CLIP`, a straight line beyond."""
    return np.where(residuals <= CLIP, residuals**2 / 2, CLIP * (residuals - CLIP / 2))


def _described(logs: Floats, start: int, index: int, end: int, detected: int) -> Change:
    candidates, costs = _likelihoods(logs, start, end, index)
    weights = np.exp(costs.min() - costs)
    order = np.argsort(-weights, kind="stable")
    mass = np.cumsum(weights[order]) / weights.sum()
    likely = candidates[order[: int(np.searchsorted(mass, CONFIDENCE)) + 1]]
    before, after = logs[max(start, index - NEAR) : index], logs[index : min(end, index + NEAR)]
    shift, low, high = shift_between(before, after)
    return Change(
        index=index,
        earliest=int(min(likely.min(), index)),
        latest=int(max(likely.max(), index)),
        detected=detected,
        factor=math.exp(shift),
        low=math.exp(low),
        high=math.exp(high),
        before=math.exp(float(np.median(before))),
        after=math.exp(float(np.median(after))),
    )


def shift_between(before: Floats, after: Floats) -> tuple[float, float, float]:
    """Hodges and Lehmann's shift between two samples, and its interval at 95 per cent by Mann and Whitney's test."""
    gaps = np.sort((after[:, None] - before[None, :]).ravel())
    pairs, points = len(gaps), len(before) + len(after)
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(pairs * (points + 1) / 12)
    rank = max(0, math.floor(pairs / 2 - half))
    return float(np.median(gaps)), float(gaps[rank]), float(gaps[len(gaps) - 1 - rank])
