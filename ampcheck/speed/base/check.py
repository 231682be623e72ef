"""Judge a comparison of two revisions: what Dynamo told first, times second. No torch runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ampcheck.core.run import Finding, Verdict, Where, passed
from ampcheck.speed.base.launches import decide_rounds, luck, rounds_of, twin_noise
from ampcheck.speed.base.stats import BASE, BUDGET_SPENT, COMPILED, EAGER, HEAD, UNCHANGED, BaseStats, Signals
from ampcheck.speed.verdict import NOISE, STRADDLES, Decision, Rule, requirement, whose_fault

_NAMED = 3


def decisions(stats: BaseStats, rule: Rule) -> dict[str, Decision]:
    """What the rounds say of each arm; the ratio is base seconds / head seconds."""
    return {arm: decide_rounds(rounds_of([one[arm] for one in stats.rounds]), rule) for arm in stats.arms}


def check_base(stats: BaseStats, rule: Rule | None = None) -> list[Finding]:
    """Graph breaks, recompilations and what is no longer compiled, then the time of the arm that is judged.

    rule: its limit is the ratio base seconds / head seconds that is required, 1 by default. More graph breaks or
    recompilations than on the base are a warning where the time passes or is undecided, and a failure where the head is
    slower too. A base that cannot run leaves one finding, which is undecided.
    """
    rule = rule or Rule()
    if stats.failure:
        message = f"not comparable: the base ({stats.base}) does not run the target: {stats.failure}"
        hint = "where the target is new there is nothing to compare with yet; else make its checkout run by itself"
        return [_finding(stats, "regression", Verdict.UNDECIDED, message, hint)]
    if stats.stopped == UNCHANGED:
        message = f"nothing was measured: nothing changed since {BASE} ({stats.base}), no file of {HEAD} differs"
        return [_finding(stats, "regression", Verdict.SKIP, message, "name an earlier commit, such as HEAD~1")]
    if not stats.rounds:
        return [_finding(stats, "regression", Verdict.SKIP, "nothing was measured: no round was run")]
    found = decisions(stats, rule)
    time = _time(stats, found, rule)
    return [*_signals(stats, time.verdict is Verdict.FAIL), *_reference(stats, found, rule), time]


def _time(stats: BaseStats, found: dict[str, Decision], rule: Rule) -> Finding:
    one, rounds = found[stats.judged], rounds_of([each[stats.judged] for each in stats.rounds])
    required = requirement(HEAD, rule.limit, f"{BASE} ({stats.base})")
    seen = (
        f"{_arm(stats.judged)}it is {one.ratio:.4g} times as fast, {one.low:.4g} to {one.high:.4g} at "
        f"{100 * rule.confidence:.4g} % confidence, in {len(stats.rounds)} launches of each side and {stats.cycles:,} "
        f"paired cycles; launches of one code differ by {100 * luck(rounds):.2g} %"
    )
    hint = "raise --launches and --launches-max, or leave other work off this machine"
    if stats.stopped == BUDGET_SPENT:
        hint = "raise --budget, which was spent before more could be launched, or leave other work off this machine"
    if one.reason == NOISE:
        noise = twin_noise(rounds)
        message = (
            f"not comparable: {BASE} and its own twin differ by up to {100 * noise:.2g} %, more than the minimum "
            f"effect of {100 * rule.effect:.4g} %; {seen}"
        )
        hint += "; or use a larger --effect"
    elif one.reason == STRADDLES:
        message = f"{required}; {seen}: too wide to decide, or between {rule.floor:.4g} and {rule.limit:.4g}"
    else:
        message = f"{required}, shortfalls below {100 * rule.effect:.4g} % not counted; {seen}"
        hint = ""
    if one.verdict is Verdict.FAIL:
        hint = "look at what the change does in a profile; torch.profiler shows the ops that grew"
    if fault := _fault(stats, found, rule):
        message += f"; {fault}"
    if stats.idle:
        message += f"; {stats.idle}"
    figures = (one.ratio, rule.limit, "times as fast", stats.cycles)
    return _finding(stats, "regression", one.verdict, message, hint, *figures)


def _reference(stats: BaseStats, found: dict[str, Decision], rule: Rule) -> list[Finding]:
    """A reference that has become slower is told; what was asked about is the compiled arm."""
    if EAGER not in stats.arms[:-1] or found[EAGER].verdict is not Verdict.FAIL:
        return []
    one = found[EAGER]
    message = (
        f"eager mode, the reference of the compiled arm, is {one.ratio:.4g} times as fast as on {BASE}, "
        f"{one.low:.4g} to {one.high:.4g} at {100 * rule.confidence:.4g} % confidence"
    )
    hint = "leave --mode out to judge the model as it is"
    return [_finding(stats, "regression", Verdict.WARN, message, hint, one.ratio, rule.limit, "times as fast")]


def _fault(stats: BaseStats, found: dict[str, Decision], rule: Rule) -> str:
    """Why the speedup over eager mode changed, where there is one."""
    if EAGER not in stats.arms[:-1]:
        return ""
    fault = whose_fault(found[EAGER], found[stats.judged], rule, names=(EAGER, stats.judged))
    before, now = (speedup(stats, side) for side in (BASE, HEAD))
    return f"{fault} (speedup over eager {before:.3g} on {BASE}, {now:.3g} on {HEAD})" if fault else ""


def speedup(stats: BaseStats, side: str) -> float:
    """How many times faster than eager mode the judged arm is on a side; from medians, for a picture."""
    return stats.seconds(EAGER, side) / stats.seconds(stats.judged, side)


def _signals(stats: BaseStats, slower: bool) -> list[Finding]:
    base, head = stats.signals.get(BASE), stats.signals.get(HEAD)
    if base is None or head is None:
        return []
    if base.untold or head.untold:
        return [_finding(stats, "graph-break", Verdict.SKIP, f"graphs were not compared: {base.untold or head.untold}")]
    if not (base.graphs or head.graphs):
        if stats.judged != COMPILED:
            return []  # nothing was to be compiled
        message = "what is judged must compile a graph, and neither side compiled any"
        hint = "torch._dynamo.config.disable, TORCHDYNAMO_DISABLE and the stance 'force_eager' switch it off"
        return [_finding(stats, "eager-fallback", Verdict.WARN, message, hint)]
    return [*_no_graph(stats, base, head, slower), *_more(stats, base, head, slower)]


def _no_graph(stats: BaseStats, base: Signals, head: Signals, slower: bool) -> list[Finding]:
    if head.graphs or not base.graphs:
        return []
    message = f"{HEAD} must still be compiled: {BASE} has {_number(base.graphs, 'graph')}, {HEAD} none"
    message += f"; {_beside(slower)}"
    return [_finding(stats, "eager-fallback", _grave(slower), message, "TORCH_LOGS=dynamo tells why it was left out")]


def _more(stats: BaseStats, base: Signals, head: Signals, slower: bool) -> list[Finding]:
    findings = []
    for slug, what, before, now in (
        ("graph-break", "graph break", base.breaks, head.breaks),
        ("recompile", "recompilation", base.recompiles, head.recompiles),
    ):
        numbers = f"{_number(len(before), what)} on {BASE}, {_number(len(now), what)} on {HEAD}"
        if len(now) <= len(before):
            message = f"no more {what}s than on {BASE}: {numbers}, in {base.graphs} and {head.graphs} graphs"
            graphs = base.graphs + head.graphs
            findings.append(_finding(stats, slug, Verdict.PASS, message, "", len(now), len(before), f"{what}s", graphs))
            continue
        message = f"{HEAD} must have no more {what}s than {BASE}: {numbers}; new: {_new(before, now)}"
        message += f"; {_beside(slower)}"
        hint = "ampcheck.assert_graph says for each how to avoid it"
        findings.append(_finding(stats, slug, _grave(slower), message, hint, len(now), len(before), f"{what}s"))
    return findings


def _new(before: Iterable[tuple[str, str]], now: Iterable[tuple[str, str]]) -> str:
    """What head has more of: lines move with every edit, so that a place is its file and its reason."""
    known = Counter((place.rpartition(":")[0] or place, reason) for place, reason in before)
    told = []
    for place, reason in now:
        key = (place.rpartition(":")[0] or place, reason)
        if known[key]:
            known[key] -= 1
        else:
            told.append(f"{place}: {reason}")
    told = list(dict.fromkeys(told))
    return ", ".join(told[:_NAMED]) + (f" and {len(told) - _NAMED} more" if len(told) > _NAMED else "")


def _grave(slower: bool) -> Verdict:
    return Verdict.FAIL if slower else Verdict.WARN


def _beside(slower: bool) -> str:
    return f"and {HEAD} is slower" if slower else "a warning, as no slowdown is shown"


def _arm(name: str) -> str:
    return f"{name}, " if name in (EAGER, COMPILED) else ""


def _number(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def _finding(
    stats: BaseStats,
    check: str,
    verdict: Verdict,
    message: str,
    hint: str = "",
    observed: float | None = None,
    limit: float | None = None,
    unit: str = "",
    seen: int = 0,
) -> Finding:
    """seen: the paired cycles, or graphs, that a pass rests on."""
    place = Where(phase="speed")
    if verdict is Verdict.PASS:
        return passed(
            check, stats.subject, message, seen, where=place, observed=observed, limit=limit, unit=unit, hint=hint
        )
    return Finding(check, verdict, stats.subject, message, place, observed, limit, unit, hint)
