"""Requires: The audit examined something. Fails when it examined nothing, and for a compiled run without a graph,
unless Dynamo gives a reason (a skip), and where an optimizer steps parameters that were replaced in the model since.
Warns if no op computed in 16 bits.

Measured: Counts of ops, tensors, modules, outputs, gradients and graphs, and of items that could not be measured, with
the reason.

Causes: Inputs with which nothing is computed, a model that torch._dynamo.disable excludes.

Fix: Use inputs with which the model does its work.
"""

from __future__ import annotations

from ampcheck.checks.always import judge_unfollowed
from ampcheck.checks.compile import seen_of
from ampcheck.checks.range import Judges
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.subject import EVERY
from ampcheck.core.text import cannot_run, counted, listed
from ampcheck.records.accuracy import AccuracyStats
from ampcheck.records.graphs import GraphStats
from ampcheck.records.numerics import VALUELESS, NumericsStats
from ampcheck.records.property import PropertyStats
from ampcheck.records.telemetry import EAGER_MODULES, TelemetryStats

CHECK = Check(
    "coverage",
    "always",
    __doc__,
    subjects=EVERY,
    needs=("NumericsStats", "TelemetryStats", "AccuracyStats", "PropertyStats"),
    order=990,
    evidence=("tests/corpus/healthy_float32_projection", "tests/corpus/squared_distance_expanded"),
)


def _of_run(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Something was looked at. Nothing looked at is a failure."""
    total = stats.coverage.total
    unseen = "; ".join(f"{reason} ({count}x)" for reason, count in stats.coverage.unseen.items())
    if stats.raised is not None:
        say = CHECK.unjudged if stats.raised.ours else CHECK.skip
        return [say(stats.name, "the run raised, so little was seen: see low-precision-error")]
    if stats.judged and not stats.low and VALUELESS in stats.coverage.unseen:
        text = f"not judged: the subject returns {VALUELESS}"
        return [CHECK.unjudged(stats.name, text, hint="let it compute with tensors that hold values")]
    if stats.judged and not stats.low:
        message = f"a verdict on {stats.format} needs ops that compute in it; no op computed in {stats.format} "
        message += f"({counted(stats.ops, 'ops')} ran)"
        hint = "is the model's autocast switched off, or does it hold only ops that autocast leaves in float32?"
        verdict = Verdict.WARN if total else Verdict.FAIL
        return [CHECK.finding(verdict, stats.name, message, observed=0, limit=1, unit="ops", hint=hint)]
    unjudged = None if stats.judged else judge_unfollowed(stats.coverage.unseen)
    if not total and unjudged is None:
        message = "a verdict needs evidence; no op, tensor or gradient was looked at"
        hint = "give inputs with which the model computes something"
        if not stats.judged:
            hint = "let this thread run an op on tensors inside the block"
        return [CHECK.fail(stats.name, message, observed=0, limit=1, unit="observations", hint=hint)]
    text = f"looked at {stats.coverage}" + (f"; not looked at: {unseen}" if unseen else "")
    text += _own_casts(stats)
    if unjudged is not None:
        verdict, lack, hint = unjudged
        return [CHECK.finding(verdict, stats.name, f"{text}; {lack}", hint=hint)]
    if stats.no_backward:
        text += f"; no backward: {stats.no_backward}"
    return [CHECK.passed(stats.name, text, total, observed=total, limit=1, unit="observations")]


def _own_casts(stats: NumericsStats) -> str:
    """The casts to 16 bits that the code makes without autocast, where nothing is lost; else one of them may be why."""
    if any(fault.reaches for fault in stats.faults):
        return ""
    text = ""
    for dtype in sorted({dtype for _, _, dtype in stats.casts}):
        sound = {(f, n): count for (f, n, d), count in stats.casts.items() if d == dtype}
        casts, places = counted(sum(sound.values()), "casts"), listed(f"{file}:{line}" for file, line in sound)
        text += f"; no loss was found at {casts} to {dtype} of your own: {places}"
    return text


def _of_results(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """Something was compiled and compared."""
    unseen = "; ".join(f"{reason} ({count}x)" for reason, count in stats.coverage.unseen.items())
    raised, subject = stats.exceptions, stats.name
    if raised.eager and raised.compiled and not raised.missing:
        message = f"the subject must run to its end; eager mode raises {raised.eager}, and compiled code raises too"
        hint = "give inputs with which the model runs, and an optimizer that takes its parameters"
        return [CHECK.fail(subject, message, where=raised.where, hint=hint)]
    if raised.eager or raised.compiled:
        return [CHECK.skip(subject, "a run raised, so nothing was compared")]
    if not stats.graphs and stats.unsupported:
        return [CHECK.skip(subject, f"nothing was compiled, and so nothing judged: {stats.unsupported}")]
    if not stats.graphs:
        message = "the subject must compile at least one graph; torch.compile made none and everything ran eager"
        hint = "see TORCH_LOGS=graph_breaks, and whether the model is excluded by torch._dynamo.disable"
        where = Where("compile")
        return [CHECK.fail(subject, message, where=where, observed=0.0, limit=1.0, unit="graphs", hint=hint)]
    if stats.incomparable:
        return [CHECK.skip(subject, f"nothing was compared: {stats.incomparable}")]
    if not stats.errors:
        message = "a verdict needs evidence; no output, gradient or update was compared"
        hint = "give inputs with which the model computes something"
        return [CHECK.fail(subject, message, observed=0.0, limit=1.0, unit="tensors", hint=hint)]
    if not stats.comparable:
        verdict = Verdict.INCOMPLETE if any(e.nan for e in stats.errors) else Verdict.SKIP
        return [CHECK.finding(verdict, subject, f"nothing was compared: {unseen}")]
    text = f"looked at {stats.coverage}" + (f"; not looked at: {unseen}" if unseen else "")
    count = len(stats.comparable)
    return [CHECK.passed(subject, text, count, observed=count, limit=1.0, unit="tensors")]


def _inside_graphs(stats: TelemetryStats, limits: Limits) -> list[Finding]:
    if stats.skipped:
        return [CHECK.skip(stats.subject, f"compiled graphs cannot be watched: {stats.skipped}")]
    unseen = "; ".join(f"{reason} ({count}x)" for reason, count in stats.coverage.unseen.items())
    if not stats.measured:
        return [_nothing_measured(stats, unseen)]
    text = f"{stats.coverage} were looked at inside compiled graphs" + (f"; not looked at: {unseen}" if unseen else "")
    if EAGER_MODULES not in stats.coverage.unseen:
        return [CHECK.passed(stats.subject, text, stats.finite_sites)]
    hint = "watch() without the model follows every op of the block, compiled functions in eager mode"
    return [CHECK.warn(stats.subject, f"{text}; what they compute was not judged", hint=hint)]


def _nothing_measured(stats: TelemetryStats, unseen: str) -> Finding:
    what = unseen or "Inductor compiled no graph: the model was not called inside, or is not compiled by it"
    wider = "without autocast and 16-bit weights nothing is rounded to 16 bits: level='all' looks at all values; "
    hint = (
        "call what torch.compile returned inside the block, with backend='inductor'; "
        f"{wider if stats.level != 'all' else ''}eager mode is judged by assert_numerics"
    )
    message = f"a value of a compiled graph must have been measured; none was: {what}"
    return CHECK.fail(stats.subject, message, hint=hint)


def _searched(stats: PropertyStats) -> Finding:
    notes = [f"looked at {stats.coverage}"]
    if stats.stopped:
        notes.append(f"{stats.examples} of {stats.budget} examples, since {stats.stopped}")
    notes += [f"{reason} ({count}x)" for reason, count in stats.coverage.unseen.items()]
    total, text = stats.coverage.total, "; ".join(notes)
    if not (stats.peak.format or stats.breakings or stats.overflow):
        text = f"a verdict on {stats.format} needs ops that compute in it; none did: {text}"
        return CHECK.warn(stats.name, text, observed=0, limit=1, unit="ops")
    if stats.outside <= stats.examples / 2:
        return CHECK.passed(stats.name, text, total, observed=total, limit=1, unit="observations")
    return CHECK.warn(stats.name, text, observed=total, limit=1, unit="observations")


def _nothing(stats: PropertyStats) -> Finding:
    if stats.lacking:
        return CHECK.skip(stats.name, f"not judged: {cannot_run(stats.lacking)}")
    message = f"a verdict needs evidence; of {stats.examples} examples none could be judged"
    notes = [f"{reason} ({count}x)" for reason, count in stats.coverage.unseen.items()]
    if stats.examples > stats.outside and not notes:
        notes.append("no output has an element")
    if stats.stopped:
        notes.append(stats.stopped)
    message += f": {'; '.join(notes)}" if notes else ""
    hint = "draw finite inputs that the function takes, and return tensors or numbers"
    return CHECK.fail(stats.name, message, observed=0, limit=1, unit="examples", hint=hint)


def _of_search(stats: PropertyStats, limits: Limits) -> list[Finding]:
    return [_searched(stats) if stats.breakings or stats.elements else _nothing(stats)]


_JUDGES: Judges = {
    NumericsStats: _of_run,
    TelemetryStats: _inside_graphs,
    AccuracyStats: _of_results,
    PropertyStats: _of_search,
}


def check(stats: NumericsStats | TelemetryStats | AccuracyStats | PropertyStats, limits: Limits) -> list[Finding]:
    """Something was looked at; nothing looked at is a failure."""
    return _JUDGES[type(stats)](stats, limits)


def of_graphs(stats: GraphStats, failed: bool) -> list[Finding]:
    """Something was compiled or ran compiled, and the subject ran to its end."""
    error = stats.error
    if error is not None and error.machine:
        return [] if failed else [CHECK.skip(stats.subject, f"not judged: {cannot_run(error.machine)}")]
    if error is not None and error.eager != "" and not failed:
        raised = f"raised {error.message}" if error.eager is None else f"raises {error.eager} in eager mode too"
        message = f"the subject must run to its end, but it {raised}"
        return [CHECK.fail(stats.subject, message, where=error.where)]
    if seen_of(stats) or stats.coverage.seen.get("graphs of child Pythons"):
        return []
    declined = [each.reason for each in stats.breaks] + [each.reason for each in stats.fallbacks]
    if declined:
        return [CHECK.skip(stats.subject, f"no graph was compiled: Dynamo declined: {declined[0]}")]
    if failed or stats.artifacts:
        return []
    message = "the subject must compile at least one graph or run compiled code; it did neither"
    hint = "call what torch.compile returned; torch._dynamo.config.disable, TORCHDYNAMO_DISABLE and the stance "
    hint += "'force_eager' switch it off"
    return [CHECK.fail(stats.subject, message, hint=hint)]
