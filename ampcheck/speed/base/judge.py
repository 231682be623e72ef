"""Measure and judge a comparison of two revisions; its run with tables and chart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from ampcheck.checks import findings
from ampcheck.checks.compile.eager_fallback import CHECK as EAGER_FALLBACK
from ampcheck.checks.compile.graph_break import CHECK as GRAPH_BREAK
from ampcheck.checks.compile.recompile import CHECK as RECOMPILE
from ampcheck.checks.speed import WHERE
from ampcheck.core.check import Evidence
from ampcheck.core.git import Side
from ampcheck.core.limits import Limits
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Chart, Coverage, Finding, Run, Scalar, Series, Table, Verdict
from ampcheck.core.text import counted, listed
from ampcheck.records.speed import (
    BASE,
    COMPILED,
    EAGER,
    HEAD,
    LAUNCHES,
    UNCHANGED,
    Decision,
    HeadComparison,
    Rule,
)
from ampcheck.speed.base.measure import measure_base
from ampcheck.speed.base.stats import BaseStats, decide_rounds, launch_deviation, rounds_of, twin_noise
from ampcheck.speed.options import SpeedOptions
from ampcheck.speed.threads import meanwhile
from ampcheck.torchtools.restore import restoring


def decisions(stats: BaseStats, rule: Rule) -> dict[str, Decision]:
    """The decision on each arm; the ratio is base seconds / head seconds."""
    return {arm: decide_rounds(rounds_of(stats.turns(arm)), rule) for arm in stats.arms}


def check_base(stats: BaseStats, rule: Rule | None = None) -> list[Finding]:
    """Graph breaks, recompilations and compilation that is gone, then the time of the arm that is judged.

    rule: its limit is the required ratio base seconds / head seconds, 1 by default. More graph breaks or recompilations
    than on the base are a warning where the time passes or is undecided, and a failure where the head is slower too.
    """
    compared = _compared(stats, rule or Rule())
    slower = compared.decision is not None and compared.decision.verdict is Verdict.FAIL
    graphs = _check_graphs(stats, slower) if compared.decision is not None else []
    return [*graphs, *findings(compared, Limits())]


def _compared(stats: BaseStats, rule: Rule) -> HeadComparison:
    """The figures of a comparison that its verdict rests on."""
    base = f"{BASE} ({stats.base})"
    compared = HeadComparison(
        stats.subject, base, rule, stats.failure, stats.stopped, stats.judged, idle=stats.idle, threads=stats.threads
    )
    if stats.failure or stats.stopped == UNCHANGED or not stats.rounds:
        return compared
    by_arm, rounds = decisions(stats, rule), rounds_of(stats.turns(stats.judged))
    eager = EAGER in stats.arms[:-1]
    return replace(
        compared,
        decision=by_arm[stats.judged],
        eager=by_arm[EAGER] if eager else None,
        speedups=(stats.speedup(BASE), stats.speedup(HEAD)) if eager else (1.0, 1.0),
        launches=len(stats.rounds),
        cycles=stats.cycles,
        deviation=launch_deviation(rounds),
        noise=twin_noise(rounds),
    )


def _check_graphs(stats: BaseStats, slower: bool) -> list[Finding]:
    base, head = stats.signals.get(BASE), stats.signals.get(HEAD)
    if base is None or head is None:
        return []
    name, worse = stats.subject, Verdict.FAIL if slower else Verdict.WARN
    effect = f"and {HEAD} is slower" if slower else "a warning, as no slowdown is shown"
    if reason := base.unavailable or head.unavailable:
        return [GRAPH_BREAK.skip(name, f"graphs were not compared: {reason}", where=WHERE)]
    if not (base.graphs or head.graphs):
        if stats.judged != COMPILED:
            return []
        message = f"the {COMPILED} arm must compile a graph, and neither side compiled any"
        hint = "torch._dynamo.config.disable, TORCHDYNAMO_DISABLE and the stance 'force_eager' switch it off"
        return [EAGER_FALLBACK.warn(name, message, where=WHERE, hint=hint)]
    findings = []
    if base.graphs and not head.graphs:
        message = f"{HEAD} must still be compiled: {BASE} has {counted(base.graphs, 'graphs')}, {HEAD} none; {effect}"
        hint = "TORCH_LOGS=dynamo reports why it was left out"
        findings.append(EAGER_FALLBACK.finding(worse, name, message, where=WHERE, hint=hint))
    for check, what, before, now in (
        (GRAPH_BREAK, "graph break", base.breaks, head.breaks),
        (RECOMPILE, "recompilation", base.recompiles, head.recompiles),
    ):
        numbers = f"{counted(len(before), f'{what}s', 'no')} on {BASE}, {counted(len(now), f'{what}s', 'no')} on {HEAD}"
        message = f"no more {what}s than on {BASE}: {numbers}, in {base.graphs} and {head.graphs} graphs"
        more = len(now) > len(before)
        if more:
            message = f"{HEAD} must have no more {what}s than {BASE}: {numbers}; new: {_new(before, now)}; {effect}"
        hint = "ampcheck.assert_compiled reports for each how to avoid it"
        evidence = Evidence(where=WHERE, observed=len(now), limit=len(before), unit=f"{what}s", hint=hint)
        verdict = worse if more else Verdict.PASS
        findings.append(check.judged(verdict, name, message, base.graphs + head.graphs, **evidence))
    return findings


def _new(before: Iterable[tuple[str, str]], now: Iterable[tuple[str, str]]) -> str:
    """Return what the head has more of, by file and reason: line numbers change with every edit."""
    known = Counter((where.rpartition(":")[0] or where, reason) for where, reason in before)
    new: dict[str, None] = {}
    for where, reason in now:
        key = (where.rpartition(":")[0] or where, reason)
        known[key] -= 1
        if known[key] < 0:
            new[f"{where}: {reason}"] = None
    return listed(new, 3)


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
            **meanwhile(stats.conditions, stats.threads),
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
