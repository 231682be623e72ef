"""Requires: Values differ from float64 by no more than rounding explains. Fails at the op that loses the digits, when
the damage reaches an output, a gradient, a weight, a buffer or a number that leaves the run, or a term vanishes from
its sum; when a decision (topk, comparison, index) differs from that of float64 by more than rounding explains, or most
of those that are the exception do; for a bound that was meant to guard (a floor under a divisor, the end of a format)
and decides most values, or before a cast to 8 bits cuts more off their norm than it rounds; for a sum that a 16-bit
weight cannot take up; for an output or gradient beyond its limit; and for an output that is 25 % off although float32
would keep it. Warns where a CPU kernel of backward sums in 16 bits.

Measured: Every floating tensor of the run has two companions: exact, the same program in float64 with all casts lifted,
and moved, the same with the data moved by one unit roundoff of the format. The distance of the two is the error that
the data explain. A value may be off by 8 times that distance and some roundings of its own, in Euclidean norms by rows,
and by tensors for gradients and what is averaged of them; precision / 2 scales this limit. An op is at fault when its
inputs were within their limits and its result is not; digits that a later sum makes good again are no finding, nor are
gradients whose error is within rounding of the whole gradient, or whose value the data do not determine. Decisions and
random numbers are those of the run. Compiled code is compared with the exact values of the eager run; if two eager runs
with equal seeds differ, the check is incomplete.

Causes: Cancellation (differences of cumulative sums, variance by E[x^2] - E[x]^2), position tables in 16 bits,
accumulation in the low format.

Fix: Compute the inputs of the reported op in float32, from where they are made; subtract before rounding.
"""

from __future__ import annotations

from ampcheck.checks.compile import GRADIENTS, VALUES, not_comparable, where_of
from ampcheck.checks.compile import passed as passed_compiled
from ampcheck.checks.range import (
    Judges,
    beyond_text,
    faults_of,
    left_out,
    op_text,
    passed,
    range_text,
    reach_text,
    within_text,
)
from ampcheck.core.check import Check, first_findings
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.subject import EVERY
from ampcheck.records import faults
from ampcheck.records.accuracy import AccuracyStats
from ampcheck.records.faults import Fault
from ampcheck.records.numerics import UNCOMPARED, VALUELESS, NumericsStats, gradient_module
from ampcheck.records.results import INTEGERS, LOST, PRECISION, TIE

CHECK = Check(
    "precision-loss",
    "range",
    __doc__,
    subjects=EVERY,
    needs=("NumericsStats", "AccuracyStats"),
    order=150,
    evidence=("tests/corpus/alibi_in_bfloat16", "tests/corpus/alpha_of_thin_density"),
)

KINDS = (faults.ROUNDING, faults.CANCELLATION, faults.DRIFT, faults.CONSTANT, faults.DECISION, faults.BOUND)
"""Faults by which digits are lost."""

_STORIES = {
    faults.ROUNDING: "the op itself is further from float64 than rounding its inputs and results explains",
    faults.CANCELLATION: "its inputs are within their bounds, and the digits that the result needs were rounded away",
    faults.DRIFT: "a running value is written again and again, and each write rounds it",
    faults.DECISION: "float64 decides otherwise by more than rounding explains",
}
_HINTS = {
    faults.ROUNDING: (
        "the kernel sums or evaluates in 16 bits: keep this op in float32 (torch.autocast(enabled=False) and .float())"
    ),
    faults.CANCELLATION: (
        "compute the inputs of this op in float32 from where they are made, or reorder: subtract before rounding, use "
        "log1p, expm1 or logsumexp, centre before squaring"
    ),
    faults.DRIFT: "accumulate in float32 and cast the result",
    faults.CONSTANT: "compute this line in float32, or take an eps that does not grow with the spacing of the format",
    faults.DECISION: "compute the scores that are decided upon in float32",
    faults.BOUND: "choose a floor far below the values, or a scale by which they fit",
}
_REPEATABLE = "draw random numbers from the generators of PyTorch, numpy or Python, and keep clocks out of forward"


def _of_run(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Outputs and gradients lie no further from float64 than the conditioning of the data and rounding explain.

    Ops whose lost digits reach a result are named.
    """
    if skipped := left_out(stats, CHECK):
        return skipped
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
        return [CHECK.incomplete(stats.name, text, hint=hint)]
    if any(error.nonfinite for error in stats.errors):
        text = "values that are inf or NaN have no error: see overflow and nonfinite-gradient"
        return [CHECK.skip(stats.name, text)]
    if named := _named(stats):
        text = f"the loss starts with {named[0].kind} at {named[0].where.op.removeprefix('aten::')}: see that finding"
        return [CHECK.skip(stats.name, text)]
    if stats.uncompared:
        text = "no output has an element that is finite in float64: see nonfinite-reference"
        return [CHECK.incomplete(stats.name, text)]
    if not stats.judged:
        return [passed(stats, CHECK, "no value lost more digits than rounding explains", stats.ops)]
    judged = [error for error in stats.of("output", "gradient") if error.known]
    if not judged:
        return [CHECK.skip(stats.name, "the data determine no digit of an output or gradient: nothing to compare")]
    worst = max(judged, key=lambda error: (not error.negligible, error.times))
    limit = worst.limit * limits.precision / PRECISION
    return [passed(stats, CHECK, within_text(worst), len(judged), worst.error, limit, "relative error")]


def _counts(fault: Fault, limits: Limits) -> bool:
    """Return whether a fault has consequences, and exceeds the limit that the user accepts."""
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
        part = f"cuts {seen.impact:.0%} off the norm of" if seen.impact else f"takes the place of {seen.error:.0%} of"
        message = (
            f"a bound must guard the values and not decide them; the {fault.note} of {op_text(stats, where)} "
            f"{part} {seen.numel:,} values"
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
    return CHECK.finding(
        verdict,
        stats.name,
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
    return [CHECK.fail(stats.name, message, where=where, observed=count, limit=0, unit="elements", hint=hint)]


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
            CHECK.fail(
                stats.name, message, where=where, observed=worst.error, limit=limit, unit="relative error", hint=hint
            )
        )
    return findings


def _named(stats: NumericsStats) -> list[Fault]:
    """The faults behind errors that other checks name."""
    return [fault for fault in faults_of(stats, (faults.OVERFLOW, faults.ZERO, faults.FLUSH)) if fault.reaches]


def _compiled(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """Outputs and gradients lie no further from float64 than the conditioning of the data and rounding explain."""
    if not stats.beside:
        return []
    if stats.incomparable and stats.errors:
        return [CHECK.incomplete(stats.name, stats.incomparable, hint=_REPEATABLE)]
    if skipped := not_comparable(stats, CHECK, (*VALUES, *GRADIENTS)):
        return [skipped]
    if any(error.nonfinite for error in stats.errors):
        return [CHECK.skip(stats.name, "values that are inf or NaN have no error: see overflow and nonfinite-gradient")]
    judged = [e for e in stats.of(("output", "gradient")) if e.absent or (e.known and e.dtype not in INTEGERS)]
    if not judged:
        return [CHECK.skip(stats.name, "the data determine no digit of an output or gradient: nothing to compare")]
    beyond = [error for error in judged if error.verdict != TIE and error.beyond(limits.precision)]
    worst = max(beyond or judged, key=lambda error: error.times)
    limit = worst.limit * limits.precision / PRECISION
    if not beyond:
        return [passed_compiled(stats, CHECK, within_text(worst), len(judged), worst.error, limit)]
    excess, alike = ([error for error in errors if error.kind == worst.kind] for errors in (beyond, judged))
    message, where = beyond_text(worst, excess, alike, limit), where_of(worst)
    hint = "if the eager audit fails as well, it names the op; otherwise see compiled-error"
    unit = "relative error"
    return [CHECK.fail(stats.name, message, where=where, observed=worst.error, limit=limit, unit=unit, hint=hint)]


_JUDGES: Judges = {NumericsStats: _of_run, AccuracyStats: _compiled}


def check(stats: NumericsStats | AccuracyStats, limits: Limits) -> list[Finding]:
    """Results and the values behind them keep the digits that their format can hold."""
    return _JUDGES[type(stats)](stats, limits)
