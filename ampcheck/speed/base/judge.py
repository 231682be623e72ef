"""Measure and judge a comparison of two revisions; its run with tables and chart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Chart, Coverage, Finding, Run, Scalar, Series, Table
from ampcheck.speed.base.checks import check_base, decisions
from ampcheck.speed.base.launches import launch_deviation, rounds_of, twin_noise
from ampcheck.speed.base.measure import measure_base
from ampcheck.speed.base.stats import BASE, EAGER, HEAD, LAUNCHES, BaseStats
from ampcheck.speed.git import Side
from ampcheck.speed.options import SpeedOptions
from ampcheck.speed.verdict import Rule
from ampcheck.torchtools.restore import restoring

_QUANTILES = (0, 0.05, 0.5, 0.95, 1)


@restoring
def judge_base(
    target: str,
    base: str,
    options: SpeedOptions | None = None,
    *,
    at_least: float = 1.0,
    device: str = "cpu",
    progress: Progress = silent,
) -> Run:
    """The run of a comparison with a base, which raises nothing for a failure. Parameters as of `measure_base`.

    at_least: how many times as fast as the base the head must be.
    """
    options = options or SpeedOptions()
    rule = options.rule(at_least)
    stats = measure_base(target, base, options, device=device, rule=rule, progress=progress)
    return base_run(stats, check_base(stats, rule), rule)


def base_run(stats: BaseStats, findings: Sequence[Finding], rule: Rule) -> Run:
    """The run of a comparison: verdicts, the tables of arms, rounds and sides, and the spread of the ratios."""
    unseen = {} if not stats.failure else {"the base, which does not run the target": 1}
    sides = {"base": _label(stats.base), "head": _label(stats.head)}
    target = {"target": stats.settings} if stats.settings else {}
    return Run(
        environment={
            **stats.fingerprint,
            **target,
            **sides,
            **{f"meanwhile: {name}": value for name, value in stats.conditions.items()},
        },
        findings=tuple(findings),
        coverage=Coverage({"launches": 3 * len(stats.rounds), "paired cycles": stats.cycles}, unseen),
        tables=(*((_arms(stats, rule), _rounds(stats)) if stats.rounds else ()), _sides(stats)),
        charts=(_spread(stats),) if stats.rounds else (),
        title=f"{stats.subject}: {HEAD} against {stats.base.name}",
    )


def _arms(stats: BaseStats, rule: Rule) -> Table:
    rows: list[tuple[Scalar, ...]] = []
    for arm, decision in decisions(stats, rule).items():
        seconds = (round(1000 * stats.seconds(arm, side), 4) for side in (BASE, HEAD))
        ratio = (round(value, 4) for value in (decision.ratio, decision.low, decision.high))
        rows.append((arm, *seconds, *ratio, str(decision.verdict) if arm == stats.judged else ""))
    judged = rounds_of(stats.turns(stats.judged))
    more = " (--launches-max allows more)" if stats.stopped == LAUNCHES else ""
    note = (
        f"base seconds / head seconds, {100 * rule.confidence:.4g} % interval over {len(stats.rounds)} launches of "
        f"each side. Launches of one code differ by {100 * launch_deviation(judged):.2g} %; the base's twin differs "
        f"from it by up to {100 * twin_noise(judged):.2g} %. Ended: {stats.stopped}{more}."
    )
    if EAGER in stats.arms[:-1]:
        note += f" Speedup over eager: {stats.speedup(BASE):.3g} on base, {stats.speedup(HEAD):.3g} on head."
    columns = ("arm", "base ms", "head ms", "head is times as fast", "from", "to", "verdict")
    return Table(f"{HEAD} against {BASE}", columns, rows, check="regression", note=note)


def _rounds(stats: BaseStats) -> Table:
    rows: list[tuple[Scalar, ...]] = []
    for number, turns in enumerate(stats.rounds, 1):
        for arm in stats.arms:
            rounds = rounds_of([turns[arm]])
            ratios = (round(math.exp(float(value[0])), 4) for value in (rounds.head, rounds.twin))
            rows.append((number, arm, turns[arm].cycles, turns[arm].calls, *ratios))
    columns = ("round", "arm", "cycles", "calls a block", "base / head", "base / twin")
    return Table("Launches, round by round", columns, rows, check="regression")


def _sides(stats: BaseStats) -> Table:
    rows = [
        (name, side.name, side.revision, side.title, side.changed)
        for name, side in ((BASE, stats.base), (HEAD, stats.head))
    ]
    note = ". ".join(f"{note[:1].upper()}{note[1:]}" for note in stats.notes)
    return Table("What was compared", ("side", "name", "commit", "subject", "uncommitted files"), rows, note=note)


def _spread(stats: BaseStats) -> Chart:
    series = []
    for arm in stats.arms:
        for number, turns in enumerate(stats.turns(arm), 1):
            ratios = np.sqrt(np.multiply(turns.base, turns.twin)) / np.asarray(turns.head)
            series.append(Series(f"{arm}, launch {number}", [float(q) for q in np.quantile(ratios, _QUANTILES)]))
    title = "head against base, cycle by cycle"
    return Chart("range", title, "times as fast", series=series, check="regression", scale="linear")


def _label(side: Side) -> str:
    how = f", {side.how}" if side.how else ""
    return f"{side.name} ({side.revision}{how})"
