"""Did the values keep their digits? Pure functions from `NumericsStats` to findings."""

from __future__ import annotations

from ampcheck.catalog.numerics import PRECISION_LOSS
from ampcheck.core.check import first_findings
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.numerics.findings import faults_of, op_text, passed, range_text, reach_text, who
from ampcheck.numerics.results import beyond_text, within_text
from ampcheck.numerics.run import UNCOMPARED, VALUELESS
from ampcheck.numerics.stats import NumericsStats, gradient_module
from ampcheck.records import faults
from ampcheck.records.results import LOST, PRECISION
from ampcheck.shadow import Fault

KINDS = (faults.ROUNDING, faults.CANCELLATION, faults.DRIFT, faults.CONSTANT, faults.DECISION, faults.BOUND)
"""Faults by which digits are lost."""

_STORIES = {
    faults.ROUNDING: "the op itself is further from float64 than rounding its inputs and results explains",
    faults.CANCELLATION: "its inputs are within their bounds, and the digits that the result needs were rounded away",
    faults.DRIFT: "a running value is written in place again and again, and each write rounds it",
    faults.DECISION: "float64 decides otherwise by more than rounding explains",
}
_HINTS = {
    faults.ROUNDING: (
        "the kernel sums or evaluates in 16 bits: keep this op in float32 (torch.autocast(enabled=False) and .float())"
    ),
    faults.CANCELLATION: (
        "compute the inputs of this op in float32, or reorder: subtract before rounding, use log1p, expm1 or "
        "logsumexp, centre before squaring"
    ),
    faults.DRIFT: "accumulate in float32 and cast the result",
    faults.CONSTANT: "compute this line in float32, or take an eps that does not grow with the spacing of the format",
    faults.DECISION: "compute the scores that are decided upon in float32",
    faults.BOUND: "choose a floor far below the values, or a scale by which they fit",
}


def check_precision_loss(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Outputs and gradients lie no further from float64 than the conditioning of the data and rounding explain.

    Ops whose lost digits reach a result are named.
    """
    check = PRECISION_LOSS
    lost = [fault for fault in faults_of(stats, KINDS) if _counts(fault, limits)]
    findings = [_at_fault(stats, fault) for fault in lost]
    findings += _misplaced(stats)
    if not findings:
        findings = _results(stats, limits)
    if findings:
        return first_findings(findings)
    if stats.judged and not stats.of("output"):
        hint = "let the model return the tensors that matter; what a model keeps to itself is not compared"
        unseen = (reason for reason in (UNCOMPARED, VALUELESS) if reason in stats.coverage.unseen)
        reason = next(unseen, "no floating tensor with elements")
        text = f"the subject returns {reason}, so no output was compared"
        return [check.incomplete(who(stats), text, hint=hint)]
    if any(error.nonfinite for error in stats.errors):
        text = "values that are inf or NaN have no error: see overflow and nonfinite-gradient"
        return [check.skip(who(stats), text)]
    if named := _named(stats):
        text = f"the loss starts with {named[0].kind} at {named[0].where.op.removeprefix('aten::')}: see that finding"
        return [check.skip(who(stats), text)]
    if stats.uncompared:
        text = "no output has an element that is finite in float64: see nonfinite-reference"
        return [check.incomplete(who(stats), text)]
    if not stats.judged:
        return [passed(stats, check, "no value lost more digits than rounding explains", stats.ops)]
    judged = [error for error in stats.of("output", "gradient") if error.known]
    if not judged:
        return [check.skip(who(stats), "the data determine no digit of an output or gradient: nothing to compare")]
    worst = max(judged, key=lambda error: (not error.negligible, error.times))
    limit = worst.limit * limits.precision / PRECISION
    return [passed(stats, check, within_text(worst), len(judged), worst.error, limit, "relative error")]


def _counts(fault: Fault, limits: Limits) -> bool:
    """Whether a fault has consequences, and exceeds the limit that the user accepts."""
    if fault.kind == faults.DECISION:
        return True  # indices and masks carry no companions: a wrong decision left the values that it was taken upon
    seen = fault.examination
    return bool(fault.reaches) and seen.error > seen.limit * limits.precision / PRECISION


def _at_fault(stats: NumericsStats, fault: Fault) -> Finding:
    seen, where = fault.examination, fault.where
    if fault.kind == faults.DECISION:
        far = f"by up to {min(seen.error, 1.0):.2g} of the values" if seen.error > seen.limit else ""
        decides = fault.note or op_text(stats, where)
        cause = f"; {op_text(stats, where)} in {fault.dtype} rounds away what ranks them" if fault.note else ""
        message = (
            f"decisions must be those of float64 unless rounding explains the difference; {fault.elements:,} of "
            f"{fault.numel:,} of {decides} differ, {far or 'more than near ties explain'}{cause}"
        )
    elif fault.kind == faults.BOUND:
        message = (
            f"a bound must guard the values and not decide them; the {fault.note} of {op_text(stats, where)} takes the "
            f"place of {seen.error:.0%} of {seen.numel:,} values"
        )
    else:
        groups = f"{seen.flagged:,} of {seen.groups:,} rows of " if seen.groups > 1 else ""
        bound = f", limit {seen.limit:.2g}, of which the data's own rounding explains {seen.spread:.2g}"
        message = (
            f"values must keep the digits that their format can hold; {groups}{op_text(stats, where)} in "
            f"{fault.dtype}: error {seen.error:.2g} against float64{bound if seen.limit else ''}; {_story(fault)}; "
            f"{range_text(fault)}"
        )
    verdict, hint = Verdict.FAIL, _HINTS[fault.kind]
    if fault.kind == faults.ROUNDING and where.phase == "backward" and stats.device == "cpu" and seen.error <= LOST:
        verdict, hint = Verdict.WARN, "kernels on a GPU sum in float32; on this CPU keep the module in float32"
    times = f"; it happens {fault.count:,} times" if fault.count > 1 else ""
    message += times + reach_text(stats, fault)
    return PRECISION_LOSS.finding(
        verdict,
        who(stats),
        message,
        where=where,
        observed=seen.error,
        limit=seen.limit,
        unit="relative error",
        hint=hint,
    )


def _story(fault: Fault) -> str:
    return fault.note if fault.note and fault.kind in (faults.CONSTANT, faults.DRIFT) else _STORIES[fault.kind]


def _misplaced(stats: NumericsStats) -> list[Finding]:
    """Infinities of float64 in whose place another value stands: a mask that low precision does not keep."""
    misplaced = [error for error in stats.errors if error.misplaced]
    if not misplaced:
        return []
    count = sum(error.misplaced for error in misplaced)
    message = (
        f"infinities must be in the same places and of the same sign as in float64; {count:,} are not, the first in "
        f"{misplaced[0]}"
    )
    hint = "write masks with a boolean mask and -inf in the format itself, after the last cast"
    where = Where(phase="forward")
    return [PRECISION_LOSS.fail(who(stats), message, where=where, observed=count, limit=0, unit="elements", hint=hint)]


def _results(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Results beyond their bounds for which no op was named: those of ops without a rule."""
    findings = []
    for kind in () if _named(stats) else ("output", "gradient"):
        errors = stats.of(kind)
        excess = [e for e in errors if e.beyond(limits.precision) and not e.nonfinite and not e.misplaced]
        if not excess:
            continue
        worst = max(excess, key=lambda error: error.times)
        module = gradient_module(worst.name) if kind == "gradient" else ""
        limit = worst.limit * limits.precision / PRECISION
        hint = "compute what leads to this result in float32, or reorder it: subtract before rounding, rescale"
        if worst.ruined and not worst.error > limit:
            module, limit = stats.lost_in or "", LOST
            coarse = "the data themselves are too coarse: keep tables, frequencies and positions in float32"
            hint = f"{coarse}, not {stats.format}"
        where = Where(phase="backward" if kind == "gradient" else "forward", module=module)
        message = beyond_text(worst, excess, errors, limit)
        findings.append(
            PRECISION_LOSS.fail(
                who(stats), message, where=where, observed=worst.error, limit=limit, unit="relative error", hint=hint
            )
        )
    return findings


def _named(stats: NumericsStats) -> list[Fault]:
    """The faults behind errors that other checks name."""
    return [fault for fault in faults_of(stats, (faults.OVERFLOW, faults.ZERO, faults.FLUSH)) if fault.reaches]
