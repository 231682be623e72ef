"""After how many calls compilation has paid: what it cost, divided by what it saves with each call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ampcheck.speed.interval import CONFIDENCE, RESAMPLES
from ampcheck.speed.startup.stats import StartupArm, StartupStats
from ampcheck.speed.stats import ArmTimes


@dataclass(frozen=True, slots=True)
class BreakEven:
    """A number of calls, and its interval at 95 per cent; infinity is never.

    cost: seconds, of the typical launch. saving: seconds of each call, negative where the arm is slower.
    """

    calls: float
    low: float
    high: float
    cost: float
    saving: float

    @property
    def never(self) -> bool:
        """Whether even the interval's near end is out of reach."""
        return math.isinf(self.low)

    @property
    def undecided(self) -> bool:
        """Whether the times do not tell if it ever pays."""
        return not self.never and math.isinf(self.high)

    def __str__(self) -> str:
        if self.never:
            return "never"
        if self.undecided:
            return f"undecided, {_number(self.low)} calls at the least"
        return f"{_number(self.calls)} calls ({_number(self.low)} to {_number(self.high)})"


def break_even(stats: StartupStats, arm: StartupArm) -> BreakEven | None:
    """Of a compiled arm; None where eager and the arm were not timed in turn.

    The saving of a call is `eager * (1 - 1 / ratio)`: the typical eager seconds, and the median of the paired ratios,
    which wanders least. Both are resampled together, by the cycle; the cost at the two ends is that of the cheapest and
    of the dearest launch, as `StartupStats.cost_range` has it: one launch has a range too.
    """
    times = stats.times(arm)
    if not times:
        return None
    cheapest, dearest = stats.cost_range(arm)
    saving, low, high = savings(*times)
    cost = arm.typical(stats.cost(arm))
    return BreakEven(calls_until(cost, saving), calls_until(cheapest, high), calls_until(dearest, low), cost, saving)


def savings(eager: ArmTimes, arm: ArmTimes, *, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float, float]:
    """Seconds that a call of `arm` saves, and the ends of its interval at 95 per cent; cycles correspond."""
    one, other = np.asarray(eager.seconds), np.asarray(arm.seconds)
    saving = float(_saving(one, other))
    if len(one) < 2:
        return saving, -math.inf, math.inf
    if np.ptp(one) == 0 and np.ptp(other) == 0:  # nothing to resample: scipy would warn
        return saving, saving, saving
    from scipy import stats as statistics

    found: Any = statistics.bootstrap(
        (one, other),
        _saving,
        paired=True,
        vectorized=True,
        n_resamples=resamples,
        confidence_level=CONFIDENCE,
        method="percentile",
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return saving, float(found.low), float(found.high)


def _saving(eager: Any, arm: Any, axis: int = -1) -> Any:
    slower = np.exp(-np.median(np.log(eager / arm), axis=axis))
    return np.median(eager, axis=axis) * (1 - slower)


def calls_until(cost: float, saving: float) -> float:
    """After how many calls `cost` seconds are saved, at `saving` seconds a call; infinity is never."""
    if saving <= 0:
        return math.inf
    return cost / saving if math.isfinite(saving) else 0.0


def _number(calls: float) -> str:
    return f"{math.ceil(calls):,}"
