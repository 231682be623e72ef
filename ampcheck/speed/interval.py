"""The statistic of a paired measurement: the median of the log-ratios, and its confidence intervals.

Tables show a percentile bootstrap at 95 per cent. Verdicts rest on the exact interval of a median from its order
statistics (the sign test inverted): it is valid for every distribution, heavy tails included, and at confidences such
as 0.9999, which a suite of many comparisons needs and whose tail no affordable number of resamples resolves. With too
few cycles for the confidence it is infinite, and nothing is decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ampcheck.speed.stats import ArmTimes, Ratio

Logs: TypeAlias = NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 2000


def log_ratios(reference: ArmTimes, arm: ArmTimes) -> Logs:
    """log(reference / arm) of each cycle, float64 [cycles]; above 0 the arm is faster."""
    logs: Logs = np.log(np.asarray(reference.seconds) / np.asarray(arm.seconds))
    return logs


def paired_ratio(reference: ArmTimes, arm: ArmTimes, *, resamples: int = RESAMPLES, seed: int = 0) -> Ratio:
    """How many times faster `arm` is, with a percentile bootstrap interval of the median at 95 per cent."""
    return ratio_of(log_ratios(reference, arm), resamples=resamples, seed=seed)


def ratio_of(logs: Logs, *, resamples: int = RESAMPLES, seed: int = 0) -> Ratio:
    """The same of log-ratios, float64 [cycles], at least one."""
    low, high = bootstrapped(np.median, logs, resamples=resamples, seed=seed)
    return Ratio(
        median=math.exp(np.median(logs)),
        low=math.exp(low),
        high=math.exp(high),
        confidence=CONFIDENCE,
        p05=math.exp(np.quantile(logs, 0.05)),
        minimum=math.exp(logs.min()),
        cycles=len(logs),
    )


def median_bounds(logs: Logs, confidence: float) -> tuple[float, float]:
    """The exact interval of the median of log-ratios; infinite where there are too few for this confidence."""
    from scipy import stats as statistics  # takes longer to import than a process may need to be measured

    interval = statistics.quantile_test(logs, q=0, p=0.5).confidence_interval(confidence)
    low, high = float(interval.low), float(interval.high)
    return (-math.inf if math.isnan(low) else low), (math.inf if math.isnan(high) else high)


def cycles_needed(confidence: float) -> int:
    """How many cycles the exact interval needs to be finite."""
    return max(1, math.ceil(math.log2(2 / (1 - confidence))))


def bootstrapped(
    statistic: Callable[..., Any], *samples: Logs, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The percentile interval at 95 per cent of a statistic of samples, float64 [cycles], whose cycles correspond."""
    if len(samples[0]) < 2:
        return -math.inf, math.inf
    if not any(np.ptp(sample) for sample in samples):  # nothing to resample: scipy would warn
        return float(statistic(*samples)), float(statistic(*samples))
    from scipy import stats as statistics

    generator = np.random.default_rng(seed)
    interval: Any = statistics.bootstrap(
        samples, statistic, paired=True, vectorized=True, n_resamples=resamples, confidence_level=CONFIDENCE,
        method="percentile", random_state=generator,
    ).confidence_interval  # fmt: skip
    return float(interval.low), float(interval.high)
