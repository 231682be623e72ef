"""Requires: The head is as fast as the base. In a history: no lasting step down.

Measured: With ampcheck speed --base: base, a twin of it, and head run in separate processes that take turns block by
block, in at least three launches, since two launches of the same compiled code differ by 2 to 3 %; the interval
includes the variation of launches. Dynamo's counts, graph breaks and recompilations, are compared first. In a history,
steps are detected in each series of one hardware; the detector has at most 1 % false alarms for each series of 60
points, so about one in a hundred series. A step is a warning, since it cannot be fixed in the current build.

Causes: More work in the step, a graph break, a shape that recompiles, a new cast by autocast, a new release of PyTorch,
a changed flag.

Fix: The finding says whether the reference became faster or the arm slower, and between which commits; torch.profiler
shows the ops that grew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ampcheck.checks.speed import WHERE, explain, percent, percent_of, requirement, show_ratio, whose_fault
from ampcheck.core.check import Check, Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.text import listed
from ampcheck.records.history import Change, Trend
from ampcheck.records.speed import (
    BASE,
    BUDGET_SPENT,
    EAGER,
    HEAD,
    NOISE,
    TARGET,
    UNCHANGED,
    Baseline,
    Decision,
    HeadComparison,
    MissingTests,
    Rule,
    SpeedRecord,
    StoredComparison,
    differences,
    hardware_of,
)

CHECK = Check(
    "regression",
    "speed",
    __doc__,
    unit="times as fast",
    needs=("HeadComparison", "Trend", "StoredComparison", "MissingTests"),
    order=801,
)

_RECENT = 30
"""Points back within which a step down is a warning; older ones are in the table."""

_AGAIN = "save a new baseline on this machine (--benchmark-save), or measure base and head in one job"


def _of_head(compared: HeadComparison) -> Iterator[Finding]:
    name = compared.subject
    if compared.failure:
        message = f"not comparable: the {compared.base} does not run the target: {compared.failure}"
        hint = (
            "a new target has no base to compare with; else make a checkout run by itself, which has what git tracks "
            "and lacks built extensions, submodules and files of Git LFS"
        )
        yield CHECK.undecided(name, message, where=WHERE, hint=hint)
    elif compared.stopped == UNCHANGED:
        message = f"nothing was measured: nothing changed since {compared.base}, no file of {HEAD} differs"
        yield CHECK.skip(name, message, where=WHERE, hint="name an earlier commit, such as HEAD~1")
    elif compared.decision is None:
        yield CHECK.skip(name, "nothing was measured: no round was run", where=WHERE)
    else:
        if (eager := compared.eager) is not None and eager.verdict is Verdict.FAIL:
            ratio, limit = show_ratio(eager, compared.rule), compared.rule.limit
            message = f"eager mode, the reference of the compiled arm, is {ratio}, compared with {BASE}"
            hint = "leave --mode out to judge the target itself"
            yield CHECK.warn(name, message, where=WHERE, observed=eager.ratio, limit=limit, hint=hint)
        yield _time(compared, compared.decision)


def _time(compared: HeadComparison, decision: Decision) -> Finding:
    required = requirement(HEAD, compared.rule.limit, compared.base)
    observed = (
        f"{'' if compared.judged == TARGET else f'{compared.judged}, '}it is {show_ratio(decision, compared.rule)}, in "
        f"{compared.launches} launches of each side and {compared.cycles:,} paired cycles; launches of one code differ "
        f"by {100 * compared.deviation:.2g} %"
    )
    hint = "raise --launches and --launches-max, or leave other work off this machine"
    if compared.stopped == BUDGET_SPENT:
        hint = "raise --budget, which was spent before more could be launched, or leave other work off this machine"
    if decision.reason == NOISE:
        hint += "; or use a larger --effect"
    elif not decision.reason:
        hint = "look at the change in a profile; torch.profiler shows the ops that grew"
    message = explain(decision, compared.rule, required, observed, BASE, compared.noise)
    threads = compared.threads
    fewer = f"all sides {threads.fewer}" if threads and threads.fewer else ""
    crowded = threads.crowded if threads and decision.verdict is Verdict.UNDECIDED else ""
    message += "".join(
        f"; {clause}" for clause in (_cause(compared, decision), compared.idle, fewer, crowded) if clause
    )
    evidence = Evidence(where=WHERE, observed=decision.ratio, limit=compared.rule.limit, hint=hint)
    return CHECK.judged(decision.verdict, compared.subject, message, compared.cycles, **evidence)


def _cause(compared: HeadComparison, decision: Decision) -> str:
    """Which of compiled and eager mode changed, where one did."""
    if compared.eager is None:
        return ""
    cause = whose_fault(compared.eager, decision, compared.rule, names=(EAGER, compared.judged))
    before, now = compared.speedups
    return f"{cause} (speedup over eager {before:.3g} on {BASE}, {now:.3g} on {HEAD})" if cause else ""


def _of_trend(trend: Trend) -> list[Finding]:
    subject, count, effect = trend.name, len(trend.series.points), trend.effect
    if trend.series.key.absolute:
        message = (
            "absolute times: no verdict, since they wander by tens of per cent without any change; "
            "a paired ratio in extra_info['ampcheck'] would be judged"
        )
        return [CHECK.skip(subject, message, where=WHERE)]
    if count < trend.least:
        there = "is 1" if count == 1 else f"are {count}"
        message = f"a step is detected from {trend.least} points of one kind of machine on; there {there}"
        return [CHECK.undecided(subject, message, where=WHERE, observed=count, limit=trend.least, unit="points")]
    findings = [
        CHECK.finding(
            trend.verdict,
            subject,
            _fell(trend, change),
            where=WHERE,
            observed=percent_of(change.factor),
            limit=-100 * effect,
            unit="%",
            hint=_confirm(trend, change),
        )
        for change in trend.changes
        if change.slower and change.index >= count - _RECENT and not trend.reversed_later(change)
    ]
    if findings:
        return findings
    message = f"no step down of {100 * effect:g} % or more in the last {min(_RECENT, count)} points, of {count} points"
    if trend.changes:
        last = trend.changes[-1]
        message += f"; the last step, {percent_of(last.factor):+.1f} %, is {count - last.index} points old"
        message += " and was reversed" if last.slower and trend.reversed_later(last) else ""
    return [CHECK.passed(subject, message, count, where=WHERE)]


def _fell(trend: Trend, change: Change) -> str:
    good, changed = (point.dated for point in trend.bounds(change))
    key, versions = trend.series.key, trend.versions(change)
    fell, least, most = (-percent_of(factor) for factor in (change.factor, change.high, change.low))
    return (
        f"{key.arm} must not become slower against {key.reference}: the ratio fell by {fell:.1f} % "
        f"(95 % interval {least:.1f} to {most:.1f} %), from {change.before:.3f} to {change.after:.3f}, after "
        f"{good}, the last good one, and not later than {changed}; "
        + (f"changed there: {versions}" if versions else "no version changed there")
        + f"; detected after {change.detected - change.index + 1} points"
    )


def _confirm(trend: Trend, change: Change) -> str:
    good, changed = (point.commit for point in trend.bounds(change))
    confirm = "measure both in one job to confirm it: the ratio falls as well when the reference becomes faster"
    if not (good and changed) or good == changed:
        return confirm
    return f"git log {good[:10]}..{changed[:10]}; {confirm} (ampcheck speed TARGET --base {good[:10]})"


def _of_stored(stored: StoredComparison) -> Iterator[Finding]:
    new, baseline, effect = stored.new, stored.baseline, stored.effect
    finding = _absent(new, baseline)
    if effect is None:
        finding = finding or _elsewhere(new, baseline)
    else:
        finding = finding or _incomparable(new, baseline) or _moved(new, baseline, effect)
    if finding is not None:
        yield finding


def _of_missing(tests: MissingTests) -> Iterator[Finding]:
    message = f"every benchmark of {tests.name} must run; this session did not run {len(tests.missing)} of them: "
    hint = "run the whole suite, or save a new baseline where tests were renamed or removed on purpose"
    yield CHECK.warn(tests.name, message + listed(tests.missing), where=WHERE, hint=hint)


def _absent(new: SpeedRecord, baseline: Baseline) -> Finding | None:
    """The finding where the baseline has nothing to compare with."""
    verdict, hint = Verdict.WARN, "save a new baseline, or give the test its former name"
    if new.name in baseline.unreadable:
        message, verdict, hint = f"not comparable: {baseline.unreadable[new.name]}", Verdict.UNDECIDED, _AGAIN
    elif new.name not in baseline.records:
        message = f"{baseline.name} has no benchmark of this name, so nothing was compared"
    elif not baseline.records[new.name]:
        message = f"not comparable: {baseline.name} has absolute times of this name, and no record of ampcheck"
        verdict, hint = Verdict.UNDECIDED, _AGAIN
    elif not baseline.same(new):
        pairs = ", ".join(dict.fromkeys(f"{old.arm} against {old.reference}" for old in baseline.records[new.name]))
        message = f"{baseline.name} has no {new.arm} against {new.reference} in its benchmark of this name, but {pairs}"
        hint = "give the arms their former names, or save a new baseline"
    else:
        return None
    return CHECK.finding(verdict, new.name, message, where=WHERE, hint=hint)


def _elsewhere(new: SpeedRecord, baseline: Baseline) -> Finding | None:
    """The finding where all earlier records are of other hardware."""
    known = [old.fingerprint for old in baseline.same(new)]
    if any(hardware_of(old) == hardware_of(new.fingerprint) for old in known):
        return None
    others = "; ".join(differences(known[-1], new.fingerprint))
    message = f"not comparable: {baseline.name} has this benchmark on other hardware only ({others})"
    return CHECK.undecided(new.name, message, where=WHERE, hint="nothing to do: a series of its own begins here")


def _incomparable(new: SpeedRecord, baseline: Baseline) -> Finding | None:
    """The finding where the last record was measured under other conditions."""
    old = baseline.same(new)[-1]
    changed = differences(old.fingerprint, new.fingerprint)
    changed += [] if old.precision == new.precision else [f"precision: {old.precision} and {new.precision}"]
    if not changed:
        return None
    message = f"not comparable: {'; '.join(changed)}; {_ratios(old, new, baseline)}"
    return CHECK.undecided(new.name, message, where=WHERE, hint=_AGAIN)


def _moved(new: SpeedRecord, baseline: Baseline, effect: float) -> Finding:
    """The verdict on two comparable records."""
    old = baseline.same(new)[-1]
    limit, noise, ratios = old.ratio / (1 + effect), max(old.noise, new.noise), _ratios(old, new, baseline)
    message = f"the ratio must not fall by more than {percent(effect)}, the variation of stored ratios; {ratios}"
    verdict, hint = Verdict.UNDECIDED, "raise the budget of the test"
    if noise > effect:
        message = f"not comparable: the reference and its twin differed by {percent(noise)}; {ratios}"
    elif new.ratio < limit and new.high < old.low:
        verdict = Verdict.WARN
        message += f": {_fault(old, new)}"
        hint = "measure base and head in one job to confirm it: a stored ratio moves with the machine's load"
    elif min(new.ratio, new.low) < limit:
        message += ": too wide to decide"
    else:
        verdict, rose = Verdict.PASS, new.ratio > old.ratio * (1 + effect) and new.low > old.high
        message += f", so it rose: {_fault(old, new)}" if rose else ""
    evidence = Evidence(where=WHERE, observed=new.ratio, limit=limit, unit="times as fast", hint=hint)
    return CHECK.judged(verdict, new.name, message, new.cycles, **evidence)


def _ratios(old: SpeedRecord, new: SpeedRecord, baseline: Baseline) -> str:
    now, before = (f"{record.ratio:.4g} ({record.low:.4g} to {record.high:.4g})" for record in (new, old))
    return f"{new.arm} is {now} times as fast as {new.reference}, it was {before} in {baseline.name}"


def _fault(old: SpeedRecord, new: SpeedRecord) -> str:
    """Which absolute time moved: a hint, for absolute times wander far more than their ratio."""
    seconds = [(old.reference_seconds, new.reference_seconds), (old.arm_seconds, new.arm_seconds)]
    if not all(before > 0 and now > 0 for before, now in seconds):
        return "whose time moved is not known"
    reference, arm = (
        Decision(Verdict.UNDECIDED, ratio, ratio, ratio) for ratio in (before / now for before, now in seconds)
    )
    clause = whose_fault(reference, arm, Rule(), names=(new.reference, new.arm))
    return f"by absolute times, which are a hint, {clause or 'neither of the two moved much'}"


_JUDGES: Mapping[type, Callable[[Any], Iterable[Finding]]] = {
    HeadComparison: _of_head,
    Trend: _of_trend,
    StoredComparison: _of_stored,
    MissingTests: _of_missing,
}


def check(record: HeadComparison | Trend | StoredComparison | MissingTests, limits: Limits) -> Iterable[Finding]:
    """Neither the head nor the last points of a history nor this session is slower than what was before."""
    return _JUDGES[type(record)](record)
