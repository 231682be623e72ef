"""Compares the compiled run of an audit with its eager run, and measures values inside the graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from ampcheck.autocast.missing import lacking
from ampcheck.catalog.compiled import COMPILED_DTYPE, COMPILED_ERROR, COMPILED_EXCEPTION, COMPILED_GRADIENT
from ampcheck.catalog.numerics import (
    COVERAGE,
    FLUSH,
    HEADROOM,
    NONFINITE_GRADIENT,
    OVERFLOW,
    PRECISION_LOSS,
    SILENT_ZERO,
)
from ampcheck.compiled.accuracy.checks import (
    GRADIENTS,
    VALUES,
    Checks,
    check_accuracy,
    check_compiled_dtype,
    check_compiled_exception,
    check_coverage,
    compared,
    module_of,
    not_comparable,
    passed,
    tables,
    where_of,
    who,
)
from ampcheck.compiled.accuracy.comparison import compare_runs, other_streams
from ampcheck.compiled.accuracy.stats import EQUAL_STREAMS, NOISE, AccuracyStats, Exceptions, counted_errors, unknown
from ampcheck.core.check import Check, first_findings
from ampcheck.core.errors import brief
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Run, Verdict, Where
from ampcheck.core.subject import Subject
from ampcheck.numerics.arm_format import arm_name
from ampcheck.numerics.compiled import measure_graphs
from ampcheck.numerics.measure import Measured
from ampcheck.numerics.record import Recorded, run_plan
from ampcheck.numerics.results import beyond_text, finite_gradients_text, lost_gradients_text, lost_text, within_text
from ampcheck.shadow.compare import INTEGERS, PRECISION, TIE
from ampcheck.telemetry.checks import check_telemetry, telemetry_tables
from ampcheck.telemetry.telemetry import Telemetry
from ampcheck.torchtools.copying import NO_SCRIPT, is_scripted, prepare, recompiled
from ampcheck.torchtools.dynamo import configured

_REPEATABLE = "draw random numbers from the generators of PyTorch, numpy or Python, and keep clocks out of forward"


def measure_compiled_run(subject: Subject, eager: Measured, dtype: torch.dtype) -> AccuracyStats:
    """Run the same under `torch.compile`, or as the subject is compiled already.

    Outputs, loss, gradients, and what the calls change are compared with the exact values of the eager run, at its loss
    scale, and what each cast inside the graphs loses is measured. Random numbers are drawn as eager mode draws them.
    """
    plan, native = eager.plan, eager.stats.native
    arm, name = arm_name(dtype, native, compiled=True), format_of(dtype).name
    stats = AccuracyStats(subject.name, arm, name, autocast=not native, scale=plan.scale)
    if is_scripted(subject):
        return replace(stats, unsupported=NO_SCRIPT)
    expected = eager.recorded
    assert expected is not None, "the eager run keeps its results only with compared=True"
    # AOTAutograd differentiates before forward runs, and raises then what eager mode raises in backward.
    for grad in (plan.grad, False) if plan.no_backward else (plan.grad,):
        prepared = prepare(subject, device=plan.device)
        telemetry = Telemetry([prepared.root] if prepared.root is not None else [], aside=True)
        with measure_graphs() as graphs, telemetry.watching(), configured({EQUAL_STREAMS: True}):
            own = replace(plan, grad=grad)
            recorded = run_plan(own, prepared, compiled=partial(recompiled, subject), masked=eager.masked)
        if recorded.ran.error is None:
            break
    raised, inside, error = Exceptions(), telemetry.read(), recorded.ran.error
    if error is not None and not (eager.stats.prevented and recorded.ran.phase == "backward"):
        raised = Exceptions(compiled=brief(error), missing=lacking(error), where=Where("compile"))
    errors, left_out = compare_runs(expected, recorded, eager.freedom)
    incomparable = "" if errors else "the calls give no tensor"
    if any(e.at_fault or e.beyond(PRECISION) for e in errors):
        incomparable = _not_repeatable(subject, eager, expected, recorded)
    seen, noise = counted_errors(errors)
    unseen = Counter(graphs.unseen) + Counter(inside.unseen) + recorded.ran.unseen + left_out + noise
    seen = Counter({"graphs": graphs.count, "values inside graphs": len(inside.sites)}) + seen
    return replace(
        stats,
        incomparable=incomparable,
        steps=plan.steps * len(subject.calls),
        errors=errors,
        exceptions=raised,
        eager_shapes=expected.ran.shapes,
        compiled_shapes=recorded.ran.shapes,
        graphs=graphs.count,
        unsupported=graphs.unsupported,
        no_gradients=eager.stats.no_backward,
        inside=inside,
        coverage=Coverage(dict(seen), dict(unseen)),
    )


def _not_repeatable(subject: Subject, eager: Measured, expected: Recorded, recorded: Recorded) -> str:
    """Why runs with equal seeds differ by themselves; "" where a second eager run gives what the first gave."""
    if other := other_streams(expected, recorded):
        return other
    again = run_plan(eager.plan, prepare(subject, device=eager.plan.device), masked=eager.masked)
    errors, _ = compare_runs(expected, again, eager.freedom)
    differs = any(error.at_fault for error in errors)
    return "two eager runs with equal seeds differ: nothing to compare compiled code with" if differs else ""


def judge_compiled_run(stats: AccuracyStats, limits: Limits, checks: Collection[str] | None = None) -> Run:
    """The findings about the compiled run of an audit, with its tables."""
    inside = telemetry_tables(replace(stats.inside, subject=who(stats))) if stats.inside is not None else ()
    findings = tuple(check_compiled_run(stats, limits, checks))
    return Run(findings=findings, coverage=stats.coverage, tables=(*tables(stats), *inside))


def check_compiled_run(stats: AccuracyStats, limits: Limits, checks: Collection[str] | None = None) -> list[Finding]:
    """The findings of the named checks, as `check_accuracy` gives those of its own table."""
    return check_accuracy(stats, limits, checks, CHECKS)


def _check_results(check: Check, kinds: tuple[str, ...], stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """What compiled code gives is within the bounds wherever what eager mode gives is."""
    if skipped := not_comparable(stats, check, kinds):
        return [skipped]
    if all(unknown(error) not in ("", NOISE) for error in stats.of(kinds)):
        return [check.skip(who(stats), "not comparable: nothing is known of what eager mode gives")]
    return [compared(stats, check, kinds, [e for e in stats.comparable if e.kind in kinds], limits)]


def check_overflow(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """No value inside the graphs, and no result, is inf or NaN where float64 is finite."""
    lost = [
        OVERFLOW.fail(
            who(stats),
            lost_text(error),
            where=Where("forward"),
            observed=error.nonfinite,
            limit=0,
            unit="elements",
            hint="the eager audit (compile=False) names the op; telemetry shows the values inside the graphs",
        )
        for error in stats.errors
        if error.kind in ("output", "loss") and error.nonfinite
    ]
    inside = _check_inside(OVERFLOW, stats, limits)
    places = [finding for finding in inside if not lost or finding.verdict in (Verdict.FAIL, Verdict.WARN)]
    return first_findings(places + lost)  # the place first


def _check_inside(check: Check, stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """What the statistics inside the graphs say of one check; damage is what the comparison with float64 found."""
    if stats.exceptions.compiled or not stats.graphs:
        return [check.skip(who(stats), "nothing ran compiled to its end: see compiled-exception and coverage")]
    if stats.inside is None or not stats.inside.measured:
        reason = (stats.inside.skipped if stats.inside is not None else "") or "nothing was measured inside the graphs"
        return [check.skip(who(stats), f"{reason}; eager mode is judged")]
    harmed = any(error.beyond(limits.precision) for error in stats.errors)
    inside = check_telemetry(replace(stats.inside, subject=who(stats)), limits, harmed=harmed)
    return [finding for finding in inside if finding.check == check.slug]


def check_nonfinite_gradient(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """Every gradient that is finite in float64 is finite here, at the loss scale of the eager run."""
    check = NONFINITE_GRADIENT
    if skipped := not_comparable(stats, check, GRADIENTS):
        return [skipped]
    gradients = stats.of(GRADIENTS)
    bad = [error for error in gradients if error.nonfinite]
    if not bad:
        return [passed(stats, check, finite_gradients_text(len(gradients), stats.scale), len(gradients))]
    message, where = lost_gradients_text(bad, gradients, stats.scale), Where("backward", module_of(bad[-1]))
    return [check.fail(who(stats), message, where=where, observed=len(bad), limit=0, unit="gradients")]


def check_precision_loss(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """Outputs and gradients lie no further from float64 than the conditioning of the data and rounding explain."""
    check = PRECISION_LOSS
    if stats.incomparable and stats.errors:
        return [check.incomplete(who(stats), stats.incomparable, hint=_REPEATABLE)]
    if skipped := not_comparable(stats, check, (*VALUES, *GRADIENTS)):
        return [skipped]
    if any(error.nonfinite for error in stats.errors):
        return [check.skip(who(stats), "values that are inf or NaN have no error: see overflow and nonfinite-gradient")]
    judged = [e for e in stats.of(("output", "gradient")) if e.absent or (e.known and e.dtype not in INTEGERS)]
    if not judged:
        return [check.skip(who(stats), "the data determine no digit of an output or gradient: nothing to compare")]
    beyond = [error for error in judged if error.verdict != TIE and error.beyond(limits.precision)]
    worst = max(beyond or judged, key=lambda error: error.times)
    limit = worst.limit * limits.precision / PRECISION
    if not beyond:
        return [passed(stats, check, within_text(worst), len(judged), worst.error, limit)]
    excess, alike = ([error for error in errors if error.kind == worst.kind] for errors in (beyond, judged))
    message, where = beyond_text(worst, excess, alike, limit), where_of(worst)
    hint = "if the eager audit fails as well, it names the op; otherwise see compiled-error"
    unit = "relative error"
    return [check.fail(who(stats), message, where=where, observed=worst.error, limit=limit, unit=unit, hint=hint)]


CHECKS: Checks = MappingProxyType(
    {
        COMPILED_EXCEPTION.slug: check_compiled_exception,
        OVERFLOW.slug: check_overflow,
        NONFINITE_GRADIENT.slug: check_nonfinite_gradient,
        PRECISION_LOSS.slug: check_precision_loss,
        **{check.slug: partial(_check_inside, check) for check in (SILENT_ZERO, FLUSH, HEADROOM)},
        COMPILED_DTYPE.slug: check_compiled_dtype,
        COMPILED_ERROR.slug: partial(_check_results, COMPILED_ERROR, VALUES),
        COMPILED_GRADIENT.slug: partial(_check_results, COMPILED_GRADIENT, GRADIENTS),
        COVERAGE.slug: check_coverage,
    }
)
"""In the order in which a reader wants them."""
