"""After how many calls compilation has paid: its cost, divided by what each call saves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampcheck.speed.interval import RESAMPLES, bootstrapped
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
        """Whether even the lower end of the interval is infinite."""
        return math.isinf(self.low)

    @property
    def undecided(self) -> bool:
        """Whether the interval includes both never and a number of calls."""
        return not self.never and math.isinf(self.high)

    def __str__(self) -> str:
        if self.never:
            return "never"
        if self.undecided:
            return f"undecided, {math.ceil(self.low):,} calls at the least"
        return f"{math.ceil(self.calls):,} calls ({math.ceil(self.low):,} to {math.ceil(self.high):,})"


def break_even(cost: float, eager: ArmTimes, arm: ArmTimes, *, lowest: float, highest: float) -> BreakEven:
    """The break-even of an arm that was timed in turn with eager mode. cost, lowest, highest: seconds of compilation.

    The saving of a call is `eager * (1 - 1 / ratio)`: the typical eager seconds, and the median of the paired ratios,
    which varies least. Both are resampled together, by the cycle.
    """
    saving, low, high = savings(eager, arm)
    return BreakEven(calls_until(cost, saving), calls_until(lowest, high), calls_until(highest, low), cost, saving)


def savings(eager: ArmTimes, arm: ArmTimes, *, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float, float]:
    """Seconds that a call of `arm` saves, and the ends of its interval at 95 per cent; cycles correspond."""
    times = np.asarray(eager.seconds), np.asarray(arm.seconds)
    return float(_saving(*times)), *bootstrapped(_saving, *times, resamples=resamples, seed=seed)


def _saving(eager: NDArray[np.float64], arm: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
    share = 1 - np.exp(-np.median(np.log(eager / arm), axis=axis))
    saved: NDArray[np.float64] = np.median(eager, axis=axis) * share
    return saved


def calls_until(cost: float, saving: float) -> float:
    """After how many calls `cost` seconds are saved, at `saving` seconds a call; infinity is never."""
    if saving <= 0:
        return math.inf
    return cost / saving if math.isfinite(saving) else 0.0
