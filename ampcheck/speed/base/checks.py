"""Findings of a comparison of two revisions: graphs first, times second. No torch runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ampcheck.catalog.compiled import EAGER_FALLBACK, GRAPH_BREAK, RECOMPILE
from ampcheck.catalog.speed import REGRESSION
from ampcheck.core.check import Evidence
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.text import counted, listed
from ampcheck.speed.base.launches import decide_rounds, launch_deviation, rounds_of, twin_noise
from ampcheck.speed.base.stats import BASE, BUDGET_SPENT, COMPILED, EAGER, HEAD, TARGET, UNCHANGED, BaseStats
from ampcheck.speed.verdict import NOISE, WHERE, Decision, Rule, explain, requirement, show_ratio, whose_fault


def decisions(stats: BaseStats, rule: Rule) -> dict[str, Decision]:
    """The decision on each arm; the ratio is base seconds / head seconds."""
    return {arm: decide_rounds(rounds_of(stats.turns(arm)), rule) for arm in stats.arms}


def check_base(stats: BaseStats, rule: Rule | None = None) -> list[Finding]:
    """Graph breaks, recompilations and compilation that is gone, then the time of the arm that is judged.

    rule: its limit is the required ratio base seconds / head seconds, 1 by default. More graph breaks or recompilations
    than on the base are a warning where the time passes or is undecided, and a failure where the head is slower too.
    """
    rule, name = rule or Rule(), stats.subject
    if stats.failure:
        message = f"not comparable: the base ({stats.base}) does not run the target: {stats.failure}"
        hint = (
            "a new target has no base to compare with; else make a checkout run by itself, which has what git tracks "
            "and lacks built extensions, submodules and files of Git LFS"
        )
        return [REGRESSION.undecided(name, message, where=WHERE, hint=hint)]
    if stats.stopped == UNCHANGED:
        message = f"nothing was measured: nothing changed since {BASE} ({stats.base}), no file of {HEAD} differs"
        return [REGRESSION.skip(name, message, where=WHERE, hint="name an earlier commit, such as HEAD~1")]
    if not stats.rounds:
        return [REGRESSION.skip(name, "nothing was measured: no round was run", where=WHERE)]
    by_arm = decisions(stats, rule)
    slower = by_arm[stats.judged].verdict is Verdict.FAIL
    return [*_check_graphs(stats, slower), *_check_eager(stats, by_arm, rule), _check_time(stats, by_arm, rule)]


def _check_time(stats: BaseStats, by_arm: dict[str, Decision], rule: Rule) -> Finding:
    decision, rounds = by_arm[stats.judged], rounds_of(stats.turns(stats.judged))
    required = requirement(HEAD, rule.limit, f"{BASE} ({stats.base})")
    observed = (
        f"{'' if stats.judged == TARGET else f'{stats.judged}, '}it is {show_ratio(decision, rule)}, in "
        f"{len(stats.rounds)} launches of each side and {stats.cycles:,} paired cycles; launches of one code differ by "
        f"{100 * launch_deviation(rounds):.2g} %"
    )
    hint = "raise --launches and --launches-max, or leave other work off this machine"
    if stats.stopped == BUDGET_SPENT:
        hint = "raise --budget, which was spent before more could be launched, or leave other work off this machine"
    if decision.reason == NOISE:
        hint += "; or use a larger --effect"
    elif not decision.reason:
        hint = "look at the change in a profile; torch.profiler shows the ops that grew"
    message = explain(decision, rule, required, observed, BASE, twin_noise(rounds))
    message += "".join(f"; {clause}" for clause in (_cause(stats, by_arm, rule), stats.idle) if clause)
    evidence = Evidence(where=WHERE, observed=decision.ratio, limit=rule.limit, hint=hint)
    return REGRESSION.judged(decision.verdict, stats.subject, message, stats.cycles, **evidence)


def _check_eager(stats: BaseStats, by_arm: dict[str, Decision], rule: Rule) -> list[Finding]:
    """A warning where eager mode, the reference of the compiled arm, has become slower."""
    if EAGER not in stats.arms[:-1] or by_arm[EAGER].verdict is not Verdict.FAIL:
        return []
    decision = by_arm[EAGER]
    message = f"eager mode, the reference of the compiled arm, is {show_ratio(decision, rule)}, compared with {BASE}"
    hint = "leave --mode out to judge the target itself"
    return [REGRESSION.warn(stats.subject, message, where=WHERE, observed=decision.ratio, limit=rule.limit, hint=hint)]


def _cause(stats: BaseStats, by_arm: dict[str, Decision], rule: Rule) -> str:
    """Which of compiled and eager mode changed, where one did."""
    if EAGER not in stats.arms[:-1]:
        return ""
    cause = whose_fault(by_arm[EAGER], by_arm[stats.judged], rule, names=(EAGER, stats.judged))
    before, now = stats.speedup(BASE), stats.speedup(HEAD)
    return f"{cause} (speedup over eager {before:.3g} on {BASE}, {now:.3g} on {HEAD})" if cause else ""


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
    """What the head has more of, by file and reason: line numbers change with every edit."""
    known = Counter((where.rpartition(":")[0] or where, reason) for where, reason in before)
    new: dict[str, None] = {}
    for where, reason in now:
        key = (where.rpartition(":")[0] or where, reason)
        known[key] -= 1
        if known[key] < 0:
            new[f"{where}: {reason}"] = None
    return listed(new, 3)
