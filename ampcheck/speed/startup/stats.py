"""After how many calls compilation has paid, with an interval."""

from __future__ import annotations

import math
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ampcheck.records.speed import ArmTimes
from ampcheck.records.startup import BreakEven, StartupArm, StartupStats
from ampcheck.speed.verdict import bootstrapped


def break_even(cost: float, eager: ArmTimes, arm: ArmTimes, *, lowest: float, highest: float) -> BreakEven:
    """The break-even of an arm that was timed in turn with eager mode. cost, lowest, highest: seconds of compilation.

    The saving of a call is `eager * (1 - 1 / ratio)`: the typical eager seconds, and the median of the paired ratios,
    which varies least. Both are resampled together, by the cycle.
    """
    saving, low, high = savings(eager, arm)
    return BreakEven(calls_until(cost, saving), calls_until(lowest, high), calls_until(highest, low), cost, saving)


def savings(eager: ArmTimes, arm: ArmTimes) -> tuple[float, float, float]:
    """Seconds that a call of `arm` saves, and the ends of its interval at 95 per cent; cycles correspond."""
    times = np.asarray(eager.seconds), np.asarray(arm.seconds)
    return float(_saving(*times)), *bootstrapped(_saving, *times)


def _saving(eager: NDArray[np.float64], arm: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
    share = 1 - np.exp(-np.median(np.log(eager / arm), axis=axis))
    saved: NDArray[np.float64] = np.median(eager, axis=axis) * share
    return saved


def calls_until(cost: float, saving: float) -> float:
    """After how many calls `cost` seconds are saved, at `saving` seconds a call; infinity is never."""
    if saving <= 0:
        return math.inf
    return cost / saving if math.isfinite(saving) else 0.0


def paid_after(stats: StartupStats, arm: StartupArm) -> BreakEven | None:
    """Of a compiled arm; None where it was not timed in turn with eager mode.

    The ends of its interval have the costs of `cost_range`, since one launch has a range too.
    """
    if not (times := stats.times(arm)):
        return None
    lowest, highest = stats.cost_range(arm)
    return break_even(median(stats.cost(arm)), *times, lowest=lowest, highest=highest)
