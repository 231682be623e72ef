"""Do the values fit the range of their format? Pure functions from `NumericsStats` to findings."""

from __future__ import annotations

from ampcheck.catalog.numerics import FLUSH, HEADROOM, INTEGER_CAST, NONFINITE_GRADIENT, OVERFLOW, SILENT_ZERO
from ampcheck.core.check import LISTED, Check, Evidence, first_findings
from ampcheck.core.formats import format_of, format_of_values
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.text import counted, listed
from ampcheck.numerics.findings import (
    elements_lost,
    faults_of,
    is_cast,
    mend_cast,
    no_gradients,
    op_text,
    passed,
    range_text,
    reach_text,
    who,
    wider,
)
from ampcheck.numerics.results import finite_gradients_text, lost_gradients_text, lost_text
from ampcheck.numerics.run import UNCOMPARED, UNREAD, VALUELESS
from ampcheck.numerics.stats import NumericsStats, gradient_module
from ampcheck.records import faults
from ampcheck.shadow import Fault

_GREW = 1.25
"""How much larger than its input a result must be to count as grown, where the input is near the maximum itself."""


def check_overflow(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """No op gives an infinity or NaN where float64 is finite.

    It fails where the damage reaches a result, a gradient, a weight or a buffer; what a clamp or a softmax absorbs is a
    warning. An additive mask that becomes -inf is neither, nor what the loss scale enlarges in backward and a mask
    absorbs: no `GradScaler` lowers the scale for it.
    """
    check = OVERFLOW
    lost = _nonfinite_results(stats)
    kept = [f for f in faults_of(stats, [faults.OVERFLOW]) if f.reaches or not _is_scaled(stats, f.where)]
    findings = [*(_overflow(stats, fault) for fault in kept), *_own_zeros(stats)]
    if not any(finding.verdict is Verdict.FAIL for finding in findings):
        findings += lost
    if not findings and stats.uncompared:
        return [check.incomplete(who(stats), "no output is finite in float64 either: see nonfinite-reference")]
    text = "no op or output became inf or NaN where float64 is finite"
    return first_findings(findings) or [passed(stats, check, text, stats.ops, 0, 0, "elements")]


def _overflow(stats: NumericsStats, fault: Fault) -> Finding:
    seen, top, op = fault.examination, format_of_values(fault.dtype).max, op_text(stats, fault.where)
    message = (
        f"finite inputs must give finite outputs; {seen.lost:,} of {seen.numel:,} elements of {op} became inf or NaN "
        f"in {fault.dtype}, and are finite in float64; {range_text(fault)}"
    )
    if seen.saturated:
        message = (
            f"a cast must not cut values off; {seen.lost:,} of {seen.numel:,} elements of {op} are {top:g}, the "
            f"largest of {fault.dtype}, where the values reach {fault.exact_amax:.3g}"
        )
    if fault.exact_amax > top and _is_scaled(stats, fault.where) and fault.dtype == "float16":
        hint = (
            "every gradient grows with the loss: let torch.amp.GradScaler lower the loss scale (here "
            f"{stats.scale:g}), divide the loss, keep this op in float32, or use {wider(fault.dtype)}; float16 ends at "
            f"{top:.6g}"
        )
    elif fault.exact_amax > top and is_cast(fault.where):
        hint = mend_cast(fault.where, f"{fault.dtype} ({top:.6g})")
    elif fault.exact_amax > top:
        hint = (
            "keep this op in float32 (torch.autocast(enabled=False) around it and .float() on its inputs), scale its "
            f"inputs down, or use {wider(fault.dtype)}; {fault.dtype} ends at {top:.6g}"
        )
    else:
        hint = (
            "an input lost the values that keep float64 finite here, such as a divisor that became zero or a root of "
            "what became negative: compute what leads to this op in float32, or clamp before it"
        )
    verdict, end = Verdict.FAIL, reach_text(stats, fault)
    if not fault.reaches:
        verdict, end = Verdict.WARN, _nothing_left(stats)
    shown = Evidence(where=fault.where, hint=hint, names=fault.reaches)
    return elements_lost(stats, OVERFLOW, verdict, message + end, seen.lost, shown)


def _nothing_left(stats: NumericsStats) -> str:
    """That an infinity reaches nothing, as far as outputs were looked at."""
    unread = [reason for reason in stats.coverage.unseen if reason.startswith((UNCOMPARED, UNREAD, VALUELESS))]
    if unread:
        return f"; nothing of it is left in gradients; whether it is in {listed(unread)} was not looked at"
    return "; nothing of it is left in outputs or gradients"


def _is_scaled(stats: NumericsStats, where: Where) -> bool:
    """Whether the size of values follows from the loss scale."""
    return where.phase == "backward" and stats.scale != 1


def _own_zeros(stats: NumericsStats) -> list[Finding]:
    """Infinities that float64 has as well and that reach an output, in a model that is kept in 16 bits.

    Its weights and buffers enter the float64 run as they are, so that these may have lost the values that kept it
    finite. In a model under autocast such infinities are its own affair: a mask, a log of zero.
    """
    if not stats.native or stats.data or not any(e.seen.exact_nan + e.seen.exact_inf for e in stats.of("output")):
        return []
    where, seen = stats.nonfinite[0] if stats.nonfinite else (Where(), None)
    if seen is None or not seen.exact_inf or seen.exact_nan or where.phase != "forward":
        return []
    message = (
        f"finite inputs must give finite outputs; {seen.exact_inf:,} of {seen.numel:,} elements of "
        f"{op_text(stats, where)} are infinite, in float64 too, given the {stats.format} weights and buffers that the "
        "model holds"
    )
    hint = f"a value that {stats.format} cannot hold may divide: keep tables and schedules in float32 buffers"
    return [elements_lost(stats, OVERFLOW, Verdict.FAIL, message, seen.exact_inf, Evidence(where=where, hint=hint))]


def _nonfinite_results(stats: NumericsStats) -> list[Finding]:
    """Outputs and losses that are not finite although float64 is, at the op whose fault makes them so."""
    where, hint = Where(phase="forward"), "no op was seen to make them: look at what is not measured"
    cause = next((fault for fault in stats.faults if fault.reaches and fault.where.phase == "forward"), None)
    findings = []
    for error in stats.of("output", "loss"):
        if error.nonfinite:
            message = lost_text(error)
            if cause is not None:
                where, hint = cause.where, _CAUSES.get(cause.kind, "mend what loses digits here: see precision-loss")
                message += f", which follows from what {op_text(stats, where)} loses"
            shown = Evidence(where=where, hint=hint, kind="output")
            findings.append(elements_lost(stats, OVERFLOW, Verdict.FAIL, message, error.nonfinite, shown))
    return findings


_CAUSES = {
    faults.ZERO: "mend what becomes zero here: see silent-zero",
    faults.FLUSH: "mend what becomes too small here: see flush",
}


def check_nonfinite_gradient(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Every gradient that is finite in float64 is finite here, at a loss scale that GradScaler settles on."""
    check = NONFINITE_GRADIENT
    if skipped := no_gradients(stats, check):
        return [skipped]
    gradients = stats.of("gradient")
    bad = [error for error in gradients if error.nonfinite]
    if not bad and stats.uncompared:
        text = "no output is finite in float64, and the default loss leaves all out: see nonfinite-reference"
        return [check.incomplete(who(stats), text)]
    if not bad:
        count = sum(error.seen.exact_nan + error.seen.exact_inf < error.seen.numel for error in gradients)
        if not count:
            return [check.incomplete(who(stats), "no gradient is finite in float64: see nonfinite-reference")]
        text = finite_gradients_text(count, stats.scale)
        return [passed(stats, check, text, count, 0, 0, "gradients"), *_cut_off(stats)]
    first = bad[-1]  # backward runs from the last parameter to the first
    message = lost_gradients_text(bad, gradients, stats.scale)
    where = Where(phase="backward", module=gradient_module(first.name))
    hint = "see overflow for the op that made the first infinity"
    if stats.scale != 1:
        hint += "; a smaller loss scale cannot mend a forward overflow"
    return [check.fail(who(stats), message, where=where, observed=len(bad), limit=0, unit="gradients", hint=hint)]


def _cut_off(stats: NumericsStats) -> list[Finding]:
    """Parameters whose gradients were asked for, and to which none leads."""
    if not stats.cut:
        return []
    reason = (
        f"{len(stats.cut)} parameters of modules that ran while gradients were off get none, so none was judged: "
        f"{listed(stats.cut, LISTED)}"
    )
    hint = (
        "a reentrant checkpoint gives none where its inputs need none (use_reentrant=False); before PyTorch 2.11 "
        "autocast keeps the casts of a part under no_grad (torch.clear_autocast_cache() after it); for weights that "
        "run under no_grad on purpose set requires_grad_(False)"
    )
    return [NONFINITE_GRADIENT.incomplete(who(stats), reason, hint=hint)]


def check_headroom(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Nothing comes near the end of its format: a warning where a value grew to within a factor of the maximum."""
    check = HEADROOM
    overflowed = {(f.where, f.dtype) for f in faults_of(stats, [faults.OVERFLOW, faults.MASK])}
    findings, closest = [], 0.0
    for (where, dtype), (result, source) in stats.largest.items():
        top = format_of(dtype).max
        # A constant near the end, such as the mask finfo.min, goes in as it comes out: nothing grew here.
        if (
            _is_scaled(stats, where)
            or (where, dtype) in overflowed
            or not result <= top
            or result <= source * (1 + 2**-7)
        ):
            continue
        closest = max(closest, result / top)
        if result * limits.headroom > top and (source * limits.headroom <= top or result > _GREW * source):
            message = (
                f"values must stay {limits.headroom:g}x below the maximum of {dtype}; {op_text(stats, where)} reaches "
                f"{result:.5g}, {top / result:.2f}x below {top:.6g}, from inputs up to {source:.5g}"
            )
            hint = f"normalise or scale before this op, or keep it in {wider(dtype)}"
            findings.append(
                check.warn(
                    who(stats), message, where=where, observed=top / result, limit=limits.headroom,
                    unit="x below max", hint=hint,
                )
            )  # fmt: skip
    if findings:
        return first_findings(findings)
    if any(fault.kind == faults.OVERFLOW for fault in stats.faults):
        return [check.skip(who(stats), "values went beyond the end of their format: see overflow")]
    seen = len(stats.largest)
    if not closest:
        return [passed(stats, check, "no op made a value of 16 bits larger than its inputs", seen)]
    text = f"the largest value that an op computed lies {1 / closest:.3g}x below the maximum of its format"
    return [passed(stats, check, text, seen, 1 / closest, limits.headroom, "x below max")]


def check_flush(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """No value loses more than its bound to zero and to subnormal numbers, on its way to a result or gradient."""
    kept = [
        fault
        for fault in faults_of(stats, [faults.FLUSH])
        if fault.examination.impact > limits.flush * format_of_values(fault.dtype).unit_roundoff
    ]
    emptied = any(fault.reaches for fault in faults_of(stats, [faults.ZERO]))
    if emptied and not any(fault.reaches for fault in kept):
        return [FLUSH.skip(who(stats), "what is lost becomes zero as a whole: see silent-zero")]
    return _vanished(stats, FLUSH, kept, "no tensor lost more than rounding to zero and subnormal numbers")


def check_silent_zero(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """No tensor becomes zero as a whole, and no guarding constant, on its way to a result or gradient."""
    kept = faults_of(stats, [faults.ZERO])
    return _vanished(stats, SILENT_ZERO, kept, "no tensor and no needed constant became zero")


def _vanished(stats: NumericsStats, check: Check, kept: list[Fault], text: str) -> list[Finding]:
    findings = []
    for fault in (fault for fault in kept if fault.reaches):
        seen, form, op = fault.examination, format_of_values(fault.dtype), op_text(stats, fault.where)
        what = "all" if seen.emptied else f"{seen.zeroed:,} of {seen.numel:,}"
        message = (
            f"values must not vanish; {what} results of {op} are 0 in {fault.dtype}, whose smallest value is "
            f"{form.smallest_subnormal:.2g}, and not in float64; {range_text(fault)}"
        )
        if not seen.zeroed:
            message = (
                f"values must stay in the normal range; results of {op} lie below {form.smallest_normal:.2g}, where "
                f"{fault.dtype} has few digits; {range_text(fault)}"
            )
        if fault.note:
            message += f"; {fault.note}"
        message += f"; error {seen.error:.2g}, limit {seen.limit:.2g}" if seen.flagged else ""
        message, hint = message + reach_text(stats, fault), _vanished_hint(fault)
        shown = Evidence(where=fault.where, hint=hint, names=fault.reaches)
        findings.append(elements_lost(stats, check, Verdict.FAIL, message, seen.zeroed, shown))
    return first_findings(findings) or [passed(stats, check, text, stats.low, 0, 0, "elements")]


def _vanished_hint(fault: Fault) -> str:
    if fault.dtype.startswith("float8"):
        hint = f"scale the values by their largest magnitude before the cast to {fault.dtype}"
        straight = "; a quantiser of forward passes gradients straight through: x + (quantised - x).detach()"
        return hint + straight if fault.where.phase == "backward" else hint
    if fault.where.phase == "backward":
        return "scale the loss (torch.amp.GradScaler), use bfloat16, or keep this op in float32"
    safe = format_of_values(fault.dtype).smallest_normal
    return (
        f"scale the values up before this op, or keep it in {wider(fault.dtype)}; an eps must be at least {safe:.1g} "
        f"in {fault.dtype}"
    )


def check_integer_cast(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Different integers stay different in floats: positions, ids and counters beyond 2^p do not.

    It fails where something computed from them, else it warns.
    """
    check, findings = INTEGER_CAST, []
    for fault in faults_of(stats, [faults.COLLISION]):
        seen = fault.examination
        what = f"{fault.elements:,} equal to another, of values up to {fault.exact_amax:.6g}"
        if seen.error:  # a conversion to integers decided
            what = (
                f"other integers than float64 of {fault.elements:,} of {fault.numel:,} values up to {fault.amax_in:.6g}"
            )
        up_to = format_of_values(fault.dtype).largest_exact_integer
        reason = fault.note if faults.ENDS in fault.note else f"{fault.dtype} holds every integer up to {up_to} only"
        message = f"different integers must stay different; {op_text(stats, fault.where)} makes {what}: {reason}"
        larger = "float64" if fault.dtype == "float32" else "float32"
        hint = f"keep positions, ids and counters in an integer dtype or {larger}, and cast the result, not the integer"
        if faults.ENDS in fault.note:
            hint = "clamp to the range of the integers before the conversion, and compute the scale in float32"
        verdict = Verdict.FAIL if fault.reaches else Verdict.WARN
        shown = Evidence(where=fault.where, hint=hint)
        findings.append(elements_lost(stats, check, verdict, message, fault.elements, shown))
    if not findings and not stats.whole:
        return [check.absent(who(stats), "no integers were seen in 16 bits")]
    text = f"different integers stayed different in {counted(stats.whole, 'results')} of 16 bits"
    return first_findings(findings) or [passed(stats, check, text, stats.whole, 0, 0, "elements")]
