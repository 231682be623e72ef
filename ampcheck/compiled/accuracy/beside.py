"""Compares the compiled run of an audit with its eager run, and measures values inside the graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from ampcheck.autocast.emulate import arm_of
from ampcheck.catalog.numerics import (
    FLUSH,
    HEADROOM,
    NONFINITE_GRADIENT,
    OVERFLOW,
    PRECISION_LOSS,
    SILENT_ZERO,
)
from ampcheck.checks import findings
from ampcheck.checks.compile import GRADIENTS, VALUES, module_of, not_comparable, passed, where_of
from ampcheck.compiled.accuracy.checks import EXCEPTION, check_coverage
from ampcheck.compiled.accuracy.judge import (
    EagerRun,
    not_repeatable,
    run_compiled,
    run_whole_or_parts,
    stats_of,
    with_places,
)
from ampcheck.compiled.accuracy.tables import tables
from ampcheck.core.check import Check, first_findings
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Run, Verdict, Where
from ampcheck.core.subject import Subject
from ampcheck.numerics.measure import Measured
from ampcheck.numerics.results import beyond_text, finite_gradients_text, lost_gradients_text, lost_text, within_text
from ampcheck.records.accuracy import AccuracyStats, Exceptions, counted_errors
from ampcheck.records.results import INTEGERS, PRECISION, TIE
from ampcheck.telemetry.checks import check_telemetry, telemetry_tables
from ampcheck.torchtools.copying import NO_SCRIPT, is_scripted

_REPEATABLE = "draw random numbers from the generators of PyTorch, numpy or Python, and keep clocks out of forward"


def measure_compiled_run(subject: Subject, eager: Measured, dtype: torch.dtype) -> AccuracyStats:
    """Run the same under `torch.compile`, or as the subject is compiled already.

    Outputs, loss, gradients, and what the calls change are compared with the exact values of the eager run, at its loss
    scale, and what each cast inside the graphs loses is measured. Random numbers are drawn as eager mode draws them.
    """
    arm = arm_of(dtype, "compiled", native=eager.stats.native)
    if is_scripted(subject):
        return AccuracyStats(subject.name, arm, format_of(dtype).name, unsupported=NO_SCRIPT, beside=True)
    assert eager.recorded is not None, "the eager run keeps its results only with compared=True"
    run = EagerRun(subject, eager.plan, dtype, {}, eager.recorded, freedom=eager.freedom, masked=eager.masked)
    compiled = run_whole_or_parts(run, inside={"aside": True})
    if compiled.raised and eager.plan.no_backward:
        # AOTAutograd differentiates before forward runs, and raises then what eager mode raises in backward.
        compiled = run_compiled(replace(run, plan=replace(eager.plan, grad=False)), inside={"aside": True})
    compiled = with_places(run, compiled)
    run.incomparable = not_repeatable(run, compiled) if compiled.errors else "the calls give no tensor"
    stats, inside = stats_of(run, compiled), compiled.inside
    assert inside is not None
    if eager.stats.prevented and compiled.outcome.ran.phase == "backward":
        stats = replace(stats, exceptions=Exceptions())
    counted, noise = counted_errors(compiled.errors)
    seen = Counter({"graphs": compiled.graphs.count, "values inside graphs": len(inside.sites)}) + counted
    unseen = Counter(compiled.graphs.unseen) + Counter(inside.unseen) + compiled.outcome.ran.unseen
    coverage = Coverage(dict(seen), dict(unseen + compiled.left_out + noise))
    return replace(stats, arm=arm, beside=True, no_gradients=eager.stats.no_backward, coverage=coverage)


def judge_compiled_run(stats: AccuracyStats, limits: Limits, checks: Collection[str] | None = None) -> Run:
    """The findings about the compiled run of an audit, with its tables."""
    inside = telemetry_tables(replace(stats.inside, subject=stats.name)) if stats.inside is not None else ()
    findings = tuple(check_compiled_run(stats, limits, checks))
    return Run(findings=findings, coverage=stats.coverage, tables=(*tables(stats), *inside))


def check_compiled_run(stats: AccuracyStats, limits: Limits, checks: Collection[str] | None = None) -> list[Finding]:
    """The findings of the named checks, as `check_accuracy` gives its own."""
    named = None if checks is None else {*checks, EXCEPTION}
    values = [f for slug, check in CHECKS.items() if checks is None or slug in checks for f in check(stats, limits)]
    return [*values, *findings(stats, limits, named), *check_coverage(stats)]


def check_overflow(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """No value inside the graphs, and no result, is inf or NaN where float64 is finite."""
    lost = [
        OVERFLOW.fail(
            stats.name,
            lost_text(error),
            where=Where("forward"),
            observed=error.nonfinite,
            limit=0,
            unit="elements",
            hint="the eager audit (compile=False) names the op; telemetry shows the values inside the graphs",
            kind="output",
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
        return [check.skip(stats.name, "nothing ran compiled to its end: see compiled-exception and coverage")]
    if stats.inside is None or not stats.inside.measured:
        reason = (stats.inside.skipped if stats.inside is not None else "") or "nothing was measured inside the graphs"
        return [check.skip(stats.name, f"{reason}; eager mode is judged")]
    harmed = any(error.beyond(limits.precision) for error in stats.errors)
    inside = check_telemetry(replace(stats.inside, subject=stats.name), limits, harmed=harmed)
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
    return [check.fail(stats.name, message, where=where, observed=len(bad), limit=0, unit="gradients")]


def check_precision_loss(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """Outputs and gradients lie no further from float64 than the conditioning of the data and rounding explain."""
    check = PRECISION_LOSS
    if stats.incomparable and stats.errors:
        return [check.incomplete(stats.name, stats.incomparable, hint=_REPEATABLE)]
    if skipped := not_comparable(stats, check, (*VALUES, *GRADIENTS)):
        return [skipped]
    if any(error.nonfinite for error in stats.errors):
        return [check.skip(stats.name, "values that are inf or NaN have no error: see overflow and nonfinite-gradient")]
    judged = [e for e in stats.of(("output", "gradient")) if e.absent or (e.known and e.dtype not in INTEGERS)]
    if not judged:
        return [check.skip(stats.name, "the data determine no digit of an output or gradient: nothing to compare")]
    beyond = [error for error in judged if error.verdict != TIE and error.beyond(limits.precision)]
    worst = max(beyond or judged, key=lambda error: error.times)
    limit = worst.limit * limits.precision / PRECISION
    if not beyond:
        return [passed(stats, check, within_text(worst), len(judged), worst.error, limit)]
    excess, alike = ([error for error in errors if error.kind == worst.kind] for errors in (beyond, judged))
    message, where = beyond_text(worst, excess, alike, limit), where_of(worst)
    hint = "if the eager audit fails as well, it names the op; otherwise see compiled-error"
    unit = "relative error"
    return [check.fail(stats.name, message, where=where, observed=worst.error, limit=limit, unit=unit, hint=hint)]


CHECKS: Mapping[str, Callable[[AccuracyStats, Limits], list[Finding]]] = MappingProxyType(
    {
        OVERFLOW.slug: check_overflow,
        NONFINITE_GRADIENT.slug: check_nonfinite_gradient,
        PRECISION_LOSS.slug: check_precision_loss,
        **{check.slug: partial(_check_inside, check) for check in (SILENT_ZERO, FLUSH, HEADROOM)},
    }
)
"""Those of values, in the order in which a reader wants them."""
