"""The compiled run of an audit: compared with the results of its eager run, and looked into by telemetry."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from ampcheck.autocast.missing import lacking
from ampcheck.catalog.compiled import COMPILED_ERROR, COMPILED_EXCEPTION, COMPILED_GRADIENT
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
    check_compiled_exception,
    check_coverage,
    compared,
    module_of,
    not_comparable,
    passed,
    tables,
    who,
)
from ampcheck.compiled.accuracy.run import Recorded
from ampcheck.compiled.accuracy.stats import EQUAL_STREAMS, AccuracyStats, Exceptions
from ampcheck.core.check import Check, first_findings
from ampcheck.core.errors import brief
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Run, Verdict, Where
from ampcheck.core.subject import Subject
from ampcheck.numerics.arm_format import arm_name
from ampcheck.numerics.compiled import measure_graphs
from ampcheck.numerics.measure import Measured, counted_results, positive
from ampcheck.numerics.run import run_subject
from ampcheck.shadow.compare import PRECISION, compare_results
from ampcheck.telemetry.checks import check_telemetry, telemetry_tables
from ampcheck.telemetry.telemetry import Telemetry
from ampcheck.torchtools.copying import NO_SCRIPT, is_scripted, prepare, recompiled
from ampcheck.torchtools.dynamo import configured

_REPEATABLE = "draw random numbers from the generators of PyTorch, numpy or Python, and keep clocks out of forward"


def measure_beside(subject: Subject, eager: Measured, dtype: torch.dtype) -> AccuracyStats:
    """Run the same under `torch.compile`, or as the subject is compiled already.

    Outputs, loss and gradients are compared with the exact values of the eager run, at its loss scale, and what each
    cast inside the graphs loses is measured. Random numbers are drawn as eager mode draws them.
    """
    plan, native = eager.plan, eager.stats.native
    arm, name = arm_name(dtype, native, compiled=True), format_of(dtype).name
    stats = AccuracyStats(subject.name, arm, name, plan.device, autocast=not native)
    if is_scripted(subject):
        return replace(stats, unsupported=NO_SCRIPT)
    prepared, compiled = prepare(subject, device=plan.device), Recorded()
    telemetry = Telemetry([prepared.root] if prepared.root is not None else [], aside=True)
    with measure_graphs() as graphs, telemetry.watching(), configured({EQUAL_STREAMS: True}):
        ran = run_subject(prepared, plan, compiled.keep, transform=partial(recompiled, subject), masked=eager.masked)
    raised, inside, error = Exceptions(), telemetry.read(), ran.error
    if error is not None and not (eager.stats.prevented and ran.phase == "backward"):
        raised = Exceptions(compiled=brief(error), missing=lacking(error), where=Where("compile"))
    results = {key: r for key, r in eager.results.items() if not raised.compiled or key in compiled.values}
    errors = compare_results(results, compiled.values, eager.freedom)
    incomparable = "" if results else "the calls give no floating tensor"
    if any(e.beyond(PRECISION) for e in errors) and not _repeats(subject, eager):
        incomparable = "two eager runs with equal seeds differ: nothing to compare compiled code with"
    seen = {"graphs": graphs.count, "values inside graphs": len(inside.sites), **counted_results(errors)}
    return replace(
        stats,
        incomparable=incomparable,
        errors=errors,
        exceptions=raised,
        graphs=graphs.count,
        unsupported=graphs.unsupported,
        no_gradients=eager.stats.no_backward,
        inside=inside,
        coverage=Coverage(positive(seen), {**graphs.unseen, **inside.unseen, **ran.unseen}),
    )


def _repeats(subject: Subject, eager: Measured) -> bool:
    """Whether a second eager run, without a shadow, gives what the first gave."""
    again = Recorded()
    run_subject(prepare(subject, device=eager.plan.device), eager.plan, again.keep, masked=eager.masked)
    return not any(error.at_fault for error in compare_results(eager.results, again.values, eager.freedom))


def beside_run(stats: AccuracyStats, limits: Limits, checks: Collection[str] | None = None) -> Run:
    """The findings about the compiled run of an audit, with its tables."""
    inside = telemetry_tables(replace(stats.inside, subject=who(stats))) if stats.inside is not None else ()
    findings = tuple(check_beside(stats, limits, checks))
    return Run(findings=findings, coverage=stats.coverage, tables=(*tables(stats), *inside))


def check_beside(stats: AccuracyStats, limits: Limits, checks: Collection[str] | None = None) -> list[Finding]:
    """The findings of the named checks, all by default; exceptions and coverage are always among them."""
    names = CHECKS if checks is None else {*checks, COMPILED_EXCEPTION.slug, COVERAGE.slug}
    return [finding for slug, check in CHECKS.items() if slug in names for finding in check(stats, limits)]


def _check_results(check: Check, kinds: tuple[str, ...], stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """What compiled code gives is within the bounds wherever what eager mode gives is."""
    if skipped := not_comparable(stats, check, kinds):
        return [skipped]
    judged = [error for error in stats.comparable if error.kind in kinds]
    if not judged:
        return [check.skip(who(stats), "not comparable: nothing is known of what eager mode gives")]
    return [compared(stats, check, kinds, judged, limits)]


def check_overflow(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """No value inside the graphs, and no result, is inf or NaN where float64 is finite."""
    lost = [
        OVERFLOW.fail(
            who(stats),
            f"outputs must be finite where float64's are; {error.nonfinite:,} elements of {error} are inf or NaN",
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
    if skipped := not_comparable(stats, NONFINITE_GRADIENT, GRADIENTS):
        return [skipped]
    gradients = [error for error in stats.errors if error.kind == "gradient"]
    bad = [error for error in gradients if error.nonfinite]
    count = len(bad)
    if not bad:
        text = f"{len(gradients)} gradients are finite where float64's are"
        return [passed(stats, NONFINITE_GRADIENT, text, len(gradients))]
    message = f"gradients must be finite where float64's are; {count} of {len(gradients)} are not, first {bad[0]}"
    where = Where("backward", module_of(bad[0]))
    return [NONFINITE_GRADIENT.fail(who(stats), message, where=where, observed=count, limit=0, unit="gradients")]


def check_precision_loss(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """Outputs and gradients lie no further from float64 than the conditioning of the data and rounding explain."""
    check = PRECISION_LOSS
    if stats.incomparable and stats.errors:
        return [check.incomplete(who(stats), stats.incomparable, hint=_REPEATABLE)]
    if skipped := not_comparable(stats, check, (*VALUES, *GRADIENTS)):
        return [skipped]
    if any(error.nonfinite for error in stats.errors):
        return [check.skip(who(stats), "values that are inf or NaN have no error: see overflow and nonfinite-gradient")]
    judged = [error for error in stats.errors if error.kind != "loss" and (error.known or error.absent)]
    if not judged:
        return [check.skip(who(stats), "the data determine no digit of an output or gradient: nothing to compare")]
    beyond = [error for error in judged if error.beyond(limits.precision)]
    worst = max(beyond or judged, key=lambda error: error.times)
    limit = worst.limit * limits.precision / PRECISION
    if not beyond:
        return [
            passed(stats, check, f"at most {worst.error:.2g} from float64, in {worst}", len(judged), worst.error, limit)
        ]
    message = (
        f"results must lie within {limit:.2g} of float64; {worst} lies {worst.error:.2g} away, and {len(beyond)} of "
        f"{len(judged)} are beyond their limits; the data's own rounding explains {worst.seen.spread:.2g}"
    )
    where = Where("backward" if worst.kind == "gradient" else "forward", module_of(worst))
    hint = "if the eager audit fails as well, it names the op; otherwise see compiled-error"
    unit = "relative error"
    return [check.fail(who(stats), message, where=where, observed=worst.error, limit=limit, unit=unit, hint=hint)]


CHECKS: Mapping[str, Callable[[AccuracyStats, Limits], list[Finding]]] = MappingProxyType(
    {
        COMPILED_EXCEPTION.slug: check_compiled_exception,
        OVERFLOW.slug: check_overflow,
        NONFINITE_GRADIENT.slug: check_nonfinite_gradient,
        PRECISION_LOSS.slug: check_precision_loss,
        **{check.slug: partial(_check_inside, check) for check in (SILENT_ZERO, FLUSH, HEADROOM)},
        COMPILED_ERROR.slug: partial(_check_results, COMPILED_ERROR, VALUES),
        COMPILED_GRADIENT.slug: partial(_check_results, COMPILED_GRADIENT, GRADIENTS),
        COVERAGE.slug: check_coverage,
    }
)
"""In the order in which a reader wants them."""
