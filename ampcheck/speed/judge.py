"""Measure until the verdicts are decided, and the run of a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ampcheck.catalog.speed import SPEEDUP
from ampcheck.core.run import Chart, Coverage, Finding, Run, Scalar, Series, Table, verify
from ampcheck.speed.clock import Clock
from ampcheck.speed.interval import log_ratios, paired_ratio
from ampcheck.speed.paired import BUDGET, Step, measure_speed
from ampcheck.speed.stats import ArmTimes, SpeedStats
from ampcheck.speed.verdict import EFFECT, FALSE_ALARMS, Rule, aa_noise, check_speed, is_decided, limits_of
from ampcheck.torchtools.restore import restoring


@restoring
def assert_speed(
    arms: Mapping[str, Step],
    *,
    at_least: float | Mapping[str, float] = 1.0,
    effect: float = EFFECT,
    comparisons: int | None = None,
    false_alarms: float = FALSE_ALARMS,
    subject: str = "subject",
    device: str = "cpu",
    budget: float = BUDGET,
    clock: Clock | None = None,
    seed: int = 0,
) -> Run:
    """Require that each arm is at least `at_least` times as fast as the first, which is the reference.

    arms: name to a callable without arguments. at_least: one ratio for all, or one for each arm that is judged.
    effect: a shortfall below this share does not count. comparisons: how many such comparisons the whole suite
    makes (by default those of this call), so that together at most `false_alarms` of suites fail without a cause.
    budget: seconds of timed steps at most; it ends earlier when the verdict is decided.

    Raises `AssertionError` for a FAIL, never for an UNDECIDED; `UsageError` as `measure_speed` does.
    """
    __tracebackhide__ = True
    limits = limits_of(arms, at_least)
    number = max(1, len(limits)) if comparisons is None else comparisons
    rules = {name: Rule(limit, effect, number, false_alarms) for name, limit in limits.items()}
    stats = measure_until_decided(arms, rules, subject=subject, device=device, budget=budget, clock=clock, seed=seed)
    return verify(speed_run(stats, check_speed(stats, rules)))


def measure_until_decided(
    arms: Mapping[str, Step],
    rules: Mapping[str, Rule],
    *,
    subject: str = "subject",
    device: str = "cpu",
    budget: float = BUDGET,
    clock: Clock | None = None,
    seed: int = 0,
) -> SpeedStats:
    """Measure until each rule has a verdict or the budget is spent. Parameters as of `measure_speed`."""
    return measure_speed(
        arms,
        subject=subject,
        device=device,
        budget=budget,
        width=None,
        decided=lambda stats: is_decided(stats, rules),
        clock=clock,
        seed=seed,
    )


def speed_run(stats: SpeedStats, findings: Sequence[Finding] = ()) -> Run:
    """The run of a measurement: verdicts, the table of arms and the spread of their times."""
    conditions = {f"meanwhile: {name}": value for name, value in stats.conditions.items()}
    return Run(
        environment={**stats.fingerprint, **conditions},
        findings=tuple(findings),
        coverage=Coverage({"paired cycles": stats.cycles, "arms": len(stats.arms)}),
        tables=(_table(stats),),
        charts=(_spread(stats),),
        title=f"speed of {stats.subject}",
    )


def _table(stats: SpeedStats) -> Table:
    """Arms with their typical times, and the paired ratio with its interval."""
    noise = 100 * aa_noise(log_ratios(stats.reference, stats.twin))
    return Table(
        f"speed of {stats.subject}",
        ("arm", "ms a call", "times as fast", "from", "to", "5th percentile", "lowest", "first call s"),
        [_row(stats, arm) for arm in stats.arms],
        check=SPEEDUP.slug,
        note=f"Median of {stats.cycles:,} paired cycles, reference seconds / arm seconds, 95 % bootstrap interval. "
        f"Noise between {stats.reference.name} and its twin: up to {noise:.2g} %. Ended: {stats.stopped}.",
    )


def _row(stats: SpeedStats, arm: ArmTimes) -> tuple[Scalar, ...]:
    ratio = paired_ratio(stats.reference, arm)
    shown = tuple(round(value, 4) for value in (ratio.median, ratio.low, ratio.high, ratio.p05, ratio.minimum))
    return (arm.name, round(1000 * arm.median, 4), *shown, round(arm.first, 3))


def _spread(stats: SpeedStats) -> Chart:
    rows = [
        Series(arm.name, [float(1000 * q) for q in np.quantile(arm.seconds, (0, 0.05, 0.5, 0.95, 1))])
        for arm in stats.arms
    ]
    title = f"time of one call of {stats.subject}"
    return Chart("range", title, "milliseconds", series=rows, check=SPEEDUP.slug, scale="linear")
