"""PASS, FAIL or UNDECIDED on paired times, with an error rate that applies to a whole suite. No torch runs here.

The requirement is `ratio >= limit`; a shortfall below the minimum effect does not count.

- FAIL: the whole interval is below the limit *and* the median is below limit / (1 + effect).
- PASS: the whole interval is above limit / (1 + effect).
- UNDECIDED: anything else.

The interval covers chance. Systematic differences show in the A/A twin of the reference. Where its interval reaches
further from 1 than the minimum effect, a failure has to be larger than the twin's own ratio, a pass has to be clear of
all that interval, the noise, and an arm that is then undecided is "not comparable".

The interval's confidence is `1 - 2 * false_alarms / (comparisons * looks)`: of all comparisons of a suite, each judged
several times while it runs, together at most `false_alarms` fail without a cause (Bonferroni's inequality, which
needs no independence).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ampcheck.checks import findings
from ampcheck.core.arguments import parse_number
from ampcheck.core.errors import UsageError
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.records.speed import (
    NOISE,
    STRADDLES,
    ArmComparison,
    ArmTimes,
    Decision,
    Ratio,
    Rule,
    SpeedRecord,
    SpeedStats,
)

Logs: TypeAlias = NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 2000


def log_ratios(reference: ArmTimes, arm: ArmTimes) -> Logs:
    """log(reference / arm) of each cycle, float64 [cycles]; above 0 the arm is faster."""
    logs: Logs = np.log(np.asarray(reference.seconds) / np.asarray(arm.seconds))
    return logs


def paired_ratio(reference: ArmTimes, arm: ArmTimes) -> Ratio:
    """Return how many times faster `arm` is, with a percentile bootstrap interval of the median at 95 per cent."""
    logs = log_ratios(reference, arm)
    low, high = bootstrapped(np.median, logs)
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
    """The interval of the median of log-ratios; infinite where there are too few for this confidence.

    From order statistics (the sign test inverted), it is exact for every distribution, heavy tails included, and at
    confidences such as 0.9999, whose tail no affordable number of resamples resolves.
    """
    count, ordered = len(logs), np.sort(logs)
    outside = int(Fraction((1 - confidence) / 2) * 2**count)  # of the 2^n signs around the median, on each side
    index, signs, more = -1, 0, 1  # more: how many have index + 1 values below the median, a binomial coefficient
    while signs + more <= outside:
        index, signs = index + 1, signs + more
        more = more * (count - index) // (index + 1)
    return (-math.inf, math.inf) if index < 0 else (float(ordered[index]), float(ordered[count - 1 - index]))


def cycles_needed(confidence: float) -> int:
    """Return how many cycles the exact interval needs to be finite."""
    return max(1, math.ceil(math.log2(2 / (1 - confidence))))


def bootstrapped(
    statistic: Callable[..., Any], *samples: Logs, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The percentile interval at 95 per cent of a statistic of samples, float64 [cycles], whose cycles correspond."""
    if len(samples[0]) < 2:
        return -math.inf, math.inf
    count = len(samples[0])
    drawn = np.random.default_rng(seed).integers(0, count, (resamples, count))
    values = statistic(*(sample[drawn] for sample in samples), axis=-1)
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def decide(logs: Logs, twin: Logs, rule: Rule) -> Decision:
    """Judge the log-ratios of one arm, given those of the reference's twin, float64 [cycles] each."""
    low, high = (math.exp(bound) for bound in median_bounds(logs, rule.confidence))
    bias = math.expm1(abs(np.median(twin)))
    return conclude(math.exp(np.median(logs)), low, high, rule, noise=aa_noise(twin), bias=bias)


def conclude(ratio: float, low: float, high: float, rule: Rule, *, noise: float, bias: float) -> Decision:
    """The verdict on a ratio with its interval at the rule's confidence.

    noise: how far the interval of the reference's twin reaches from 1, as a share; bias: how far its ratio itself is.
    """
    noisy = noise > rule.effect
    slack = 1 + bias if noisy else 1.0
    if high * slack < rule.limit and ratio * slack < rule.floor:
        return Decision(Verdict.FAIL, ratio, low, high)
    if low > rule.floor * (1 + noise if noisy else 1.0):
        return Decision(Verdict.PASS, ratio, low, high)
    return Decision(Verdict.UNDECIDED, ratio, low, high, NOISE if noisy else STRADDLES)


def aa_noise(twin: Logs) -> float:
    """Return how far the twin's 95 per cent interval reaches from 1, as a share."""
    low, high = (math.exp(bound) for bound in median_bounds(twin, CONFIDENCE))
    return max(1 - low, high - 1)


def check_speed(stats: SpeedStats, rules: Mapping[str, Rule] | Rule | None = None) -> list[Finding]:
    """One finding for each arm that is compared with the reference, or for those that `rules` names.

    rules: the requirement on each arm; one `Rule` for all; by default no arm may be slower than the reference.
    """
    noise = aa_noise(log_ratios(stats.reference, stats.twin))
    compared = [
        ArmComparison(stats, arm, rule, _decided(stats, arm, rule), noise, cycles_needed(rule.confidence))
        for arm, rule in _rules(stats, rules)
    ]
    return [finding for comparison in compared for finding in findings(comparison, Limits())]


def is_decided(stats: SpeedStats, rules: Mapping[str, Rule] | Rule | None = None) -> bool:
    """Return whether more measurement would change no verdict: each is PASS or FAIL."""
    return all(_decided(stats, arm, rule).verdict is not Verdict.UNDECIDED for arm, rule in _rules(stats, rules))


def _rules(stats: SpeedStats, rules: Mapping[str, Rule] | Rule | None) -> list[tuple[ArmTimes, Rule]]:
    if not isinstance(rules, Mapping):
        rule = rules or Rule(comparisons=max(1, len(stats.compared)))
        return [(arm, rule) for arm in stats.compared]
    judged = [(stats.arm(name), rule) for name, rule in rules.items()]
    if not judged or not all(arm in stats.compared for arm, _ in judged):
        named = ", ".join(arm.name for arm in stats.compared)
        raise UsageError(f"rules name at least one arm other than the reference and its twin; there are {named}")
    return judged


def limits_of(arms: object, at_least: object) -> dict[str, float]:
    """The least ratio of each arm that is judged, before anything runs.

    arms: a mapping whose first name is the reference. at_least: one ratio for all others, or one for some by name.
    Raises `UsageError` where no arm would be judged, one is not there, or a limit is no number above 0.
    """
    names = list(arms)[1:] if isinstance(arms, Mapping) else []
    limits: dict[str, object] = dict(at_least) if isinstance(at_least, Mapping) else dict.fromkeys(names, at_least)
    if wrong := [name for name in limits if name not in names]:
        raise UsageError(
            f"at_least names {wrong[0]!r}, which is no arm after the reference; there are {', '.join(names)}"
        )
    if names and not limits:
        raise UsageError(f"at_least names no arm to judge; there are {', '.join(names)}")
    return {name: parse_number(limit, "at_least") for name, limit in limits.items()}


def _decided(stats: SpeedStats, arm: ArmTimes, rule: Rule) -> Decision:
    return decide(log_ratios(stats.reference, arm), log_ratios(stats.reference, stats.twin), rule)


def record_of(stats: SpeedStats, arm: str, *, name: str, precision: str = "float32", verdict: str = "") -> SpeedRecord:
    """The record of one arm."""
    times = stats.arm(arm)
    ratio = asdict(paired_ratio(stats.reference, times))
    return SpeedRecord(
        name=name,
        reference=stats.reference.name,
        arm=arm,
        ratio=ratio.pop("median"),
        **ratio,
        noise=aa_noise(log_ratios(stats.reference, stats.twin)),
        precision=precision,
        reference_seconds=stats.reference.median,
        arm_seconds=times.median,
        verdict=verdict,
        fingerprint=stats.fingerprint,
    )
