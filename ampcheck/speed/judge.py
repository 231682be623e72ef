"""Measure until the verdicts are decided, and the run of a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ampcheck.core.run import Chart, Coverage, Finding, Run, Scalar, Series, Table
from ampcheck.records.speed import ArmTimes, Rule, SpeedStats
from ampcheck.records.threads import Threads
from ampcheck.speed.options import SpeedOptions
from ampcheck.speed.paired import BUDGET, Step, measure_speed
from ampcheck.speed.threads import meanwhile
from ampcheck.speed.verdict import aa_noise, is_decided, log_ratios, paired_ratio


def measure_until_decided(
    arms: Mapping[str, Step],
    rules: Mapping[str, Rule],
    options: SpeedOptions,
    *,
    subject: str,
    device: str = "cpu",
    threads: Threads | None = None,
) -> SpeedStats:
    """Measure until each rule has a verdict or the budget is spent, as `measure_speed` does."""
    budget, clock, seed = options.budget or BUDGET, options.clock, options.seed
    return measure_speed(
        arms, subject=subject, device=device, budget=budget, width=None, clock=clock, seed=seed, threads=threads,
        decided=lambda stats: is_decided(stats, rules),
    )  # fmt: skip


def speed_run(stats: SpeedStats, findings: Sequence[Finding] = ()) -> Run:
    """The run of a measurement: verdicts, the table of arms and the spread of their times."""
    return Run(
        environment={**stats.fingerprint, **meanwhile(stats.conditions, stats.threads)},
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
        check="speedup",
        note=f"Median of {stats.cycles:,} paired cycles, reference seconds / arm seconds, 95 % bootstrap interval. "
        f"Noise between {stats.reference.name} and its twin: up to {noise:.2g} %. Ended: {stats.stopped}."
        + (f" All arms {stats.threads.fewer}." if stats.threads and stats.threads.fewer else ""),
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
    return Chart("range", title, "milliseconds", series=rows, check="speedup", scale="linear")
