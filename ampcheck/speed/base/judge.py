"""Compare, judge, tell: what a test calls, and the run that a comparison makes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ampcheck.core.run import Chart, Coverage, Finding, Run, Scalar, Series, Table, verify
from ampcheck.speed.base.check import check_base, decisions, speedup
from ampcheck.speed.base.launches import luck, rounds_of, twin_noise
from ampcheck.speed.base.measure import measure_base
from ampcheck.speed.base.stats import BASE, EAGER, HEAD, LAUNCHES, BaseStats, Side, Turns
from ampcheck.speed.interval import Logs
from ampcheck.speed.verdict import EFFECT, FALSE_ALARMS, Rule
from ampcheck.torchtools.restore import restoring

_QUANTILES = (0, 0.05, 0.5, 0.95, 1)


@restoring
def assert_base(
    target: str,
    base: str,
    *,
    effect: float = EFFECT,
    comparisons: int = 1,
    false_alarms: float = FALSE_ALARMS,
    **settings: Any,
) -> Run:
    """Require that the working tree is not slower than a base revision of the same repository.

    effect, comparisons, false_alarms: as of `Rule`. settings: as of `measure_base`: mode, precision, device, budget,
    launches, launches_max. Raises `AssertionError` for a FAIL, never for an UNDECIDED; `UsageError` as `measure_base`
    does.
    """
    __tracebackhide__ = True
    return verify(judge_base(target, base, rule=Rule(1.0, effect, comparisons, false_alarms), **settings))


def judge_base(target: str, base: str, *, rule: Rule, **settings: Any) -> Run:
    """As `assert_base`: the verdict stands in the run, it is neither raised nor emitted."""
    stats = measure_base(target, base, rule=rule, **settings)
    return base_run(stats, check_base(stats, rule), rule)


def base_run(stats: BaseStats, findings: Sequence[Finding], rule: Rule) -> Run:
    """The run of a comparison: verdicts, the tables of arms, rounds and sides, and the spread of the ratios."""
    unseen = {} if not stats.failure else {"the base, which does not run the target": 1}
    return Run(
        environment=_environment(stats),
        findings=tuple(findings),
        coverage=Coverage({"launches": 3 * len(stats.rounds), "paired cycles": stats.cycles}, unseen),
        tables=(*((_arms(stats, rule), _rounds(stats)) if stats.rounds else ()), _sides(stats)),
        charts=(_spread(stats),) if stats.rounds else (),
        title=f"{stats.subject}: {HEAD} against {stats.base.name}",
    )


def _arms(stats: BaseStats, rule: Rule) -> Table:
    rows: list[tuple[Scalar, ...]] = []
    for arm, one in decisions(stats, rule).items():
        seconds = (round(1000 * stats.seconds(arm, side), 4) for side in (BASE, HEAD))
        ratio = (round(value, 4) for value in (one.ratio, one.low, one.high))
        verdict = str(one.verdict) if arm == stats.judged else ""
        rows.append((arm, *seconds, *ratio, verdict))
    judged = rounds_of([one[stats.judged] for one in stats.rounds])
    note = f"base seconds / head seconds, {100 * rule.confidence:.4g} % interval over {len(stats.rounds)} launches of "
    note += f"each side. Launches of one code differ by {100 * luck(judged):.2g} %; the base's twin differs from it "
    note += f"by up to {100 * twin_noise(judged):.2g} %. Ended: {stats.stopped}{_more(stats)}."
    if EAGER in stats.arms[:-1]:
        note += f" Speedup over eager: {speedup(stats, BASE):.3g} on base, {speedup(stats, HEAD):.3g} on head."
    columns = ("arm", "base ms", "head ms", "head is times as fast", "from", "to", "verdict")
    return Table(f"{HEAD} against {BASE}", columns, rows, check="regression", note=note)


def _more(stats: BaseStats) -> str:
    return " (--launches-max allows more)" if stats.stopped == LAUNCHES else ""


def _rounds(stats: BaseStats) -> Table:
    rows: list[tuple[Scalar, ...]] = []
    for number, each in enumerate(stats.rounds, 1):
        for arm in stats.arms:
            found = rounds_of([each[arm]])
            ratios = (round(math.exp(float(value[0])), 4) for value in (found.head, found.twin))
            rows.append((number, arm, each[arm].cycles, each[arm].calls, *ratios))
    columns = ("round", "arm", "cycles", "calls a block", "base / head", "base / twin")
    return Table("Launches, round by round", columns, rows, check="regression")


def _sides(stats: BaseStats) -> Table:
    rows = [(name, *_side(side)) for name, side in ((BASE, stats.base), (HEAD, stats.head))]
    note = ". ".join(f"{note[:1].upper()}{note[1:]}" for note in stats.notes)
    return Table("What was compared", ("side", "name", "commit", "subject", "uncommitted files"), rows, note=note)


def _side(side: Side) -> tuple[Scalar, ...]:
    return side.name, side.revision, side.title, side.changed


def _spread(stats: BaseStats) -> Chart:
    rows = [
        Series(f"{arm}, launch {number}", [float(value) for value in np.quantile(_ratios(each[arm]), _QUANTILES)])
        for arm in stats.arms
        for number, each in enumerate(stats.rounds, 1)
    ]
    title = "head against base, cycle by cycle"
    return Chart("range", title, "times as fast", series=rows, check="regression", scale="linear")


def _ratios(one: Turns) -> Logs:
    ratios: np.ndarray[tuple[int], np.dtype[np.float64]] = np.sqrt(np.multiply(one.base, one.twin)) / np.asarray(
        one.head
    )
    return ratios


def _environment(stats: BaseStats) -> dict[str, Scalar]:
    sides = {"base": _shown(stats.base), "head": _shown(stats.head)}
    meanwhile = {f"meanwhile: {name}": value for name, value in stats.conditions.items()}
    asked = {"target": stats.asked} if stats.asked else {}
    return {**stats.fingerprint, **asked, **sides, **meanwhile}


def _shown(side: Side) -> str:
    how = f", {side.how}" if side.how else ""
    return f"{side.name} ({side.revision}{how})"
