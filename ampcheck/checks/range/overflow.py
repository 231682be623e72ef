"""Requires: An op gives finite results where float64 does, and integers fit their format. Fails when an infinity or NaN
of low precision reaches an output, a declared loss, a gradient, a weight or a buffer; warns when it disappears before.
Gradients that are discarded and finite later, at a lower loss scale, and a result that code tests and computes again,
are no failure.

Measured: Every op of forward and backward is compared with its float64 value, below autocast. The first op that gives a
non-finite element where float64 is finite is reported; ops that propagate it are not. A -inf that the model writes on
purpose, and an additive mask that becomes -inf and that softmax absorbs, are no findings. On a CPU, sums, products and
powers of integers of up to 16 bits, and sums and matrix products of 32, are computed again with 64, up to 4 million
elements, and so is what is made of those that wrap around; the check fails where floating values, or a number that
leaves the run, are other ones then. Inside a compiled graph, each cast to 16 bits and each product records its losses.
ampcheck.watch fails when the last loss passed to `seen.step(loss)` is not finite. In a training loop the check fails
when the losses of the last three observed steps are not finite.

Causes: Sums and products beyond 65504 in float16 (feed-forward projections, residual streams, variances), finfo.min
added to a negative score, a divisor whose eps is zero in the format; sums of uint8 masks, products of int8 codes.

Fix: Keep the op in float32, scale its inputs, use bfloat16, write masks with where or masked_fill instead of adding.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ampcheck.checks.range import (
    Judges,
    elements_lost,
    faults_of,
    is_cast,
    is_scaled,
    left_out,
    lost_text,
    mend_cast,
    mend_nonfinite,
    op_text,
    passed,
    range_text,
    reach_text,
    returned_text,
    wider,
)
from ampcheck.checks.range._graphs import (
    bad_elements,
    finding,
    in_phase,
    inside,
    judged,
    value_text,
)
from ampcheck.core.check import Check, Evidence, first_findings
from ampcheck.core.formats import format_of_values
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.subject import EVERY
from ampcheck.core.text import listed
from ampcheck.records import faults
from ampcheck.records.accuracy import AccuracyStats
from ampcheck.records.faults import Fault
from ampcheck.records.finite import FiniteStats
from ampcheck.records.numerics import UNCOMPARED, UNREAD, VALUELESS, NumericsStats
from ampcheck.records.telemetry import TelemetryStats

CHECK = Check(
    "overflow",
    "range",
    __doc__,
    subjects=EVERY,
    needs=("NumericsStats", "TelemetryStats", "AccuracyStats", "FiniteStats"),
    order=120,
    evidence=("tests/corpus/additive_mask_times_1e9", "tests/corpus/attention_without_scaling"),
)


_ADDS = ("aten::add.", "aten::add_.", "aten::sub.", "aten::sub_.")


def _of_run(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """No op gives an infinity or NaN where float64 is finite.

    It fails where the damage reaches a result, a gradient, a weight or a buffer; what a clamp or a softmax absorbs is a
    warning. An additive mask that becomes -inf is neither, nor what the loss scale enlarges in backward and a mask
    absorbs: no `GradScaler` lowers the scale for it.
    """
    if skipped := left_out(stats, CHECK):
        return skipped
    lost = _nonfinite_results(stats)
    kept = [f for f in faults_of(stats, [faults.OVERFLOW]) if f.reaches or not is_scaled(stats, f.where)]
    wrapped = [_wrapped(stats, fault) for fault in faults_of(stats, [faults.WRAP])]
    findings = [*(_overflow(stats, fault) for fault in kept), *wrapped, *_own_zeros(stats)]
    if not any(finding.verdict is Verdict.FAIL for finding in findings):
        findings += lost
    if not findings and stats.uncompared:
        return [CHECK.incomplete(stats.name, "no output is finite in float64 either: see nonfinite-reference")]
    text = "no op or output became inf or NaN where float64 is finite"
    return first_findings(findings) or [passed(stats, CHECK, text, stats.ops, 0, 0, "elements")]


def _wrapped(stats: NumericsStats, fault: Fault) -> Finding:
    """Integers of a narrow format that wrapped around, and that floating values were made of."""
    message = (
        f"integers must fit their format; {fault.elements:,} of {fault.numel:,} elements of "
        f"{op_text(stats, fault.where)} wrap around: {fault.dtype} holds {fault.note}{reach_text(stats, fault)}"
    )
    hint = "compute in int64 (of a sum, dtype=torch.int64), or convert to float32 before the op"
    shown = Evidence(where=fault.where, hint=hint, names=fault.reaches)
    return elements_lost(stats, CHECK, Verdict.FAIL, message, fault.elements, shown)


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
    if fault.exact_amax > top and is_scaled(stats, fault.where) and fault.dtype == "float16":
        hint = (
            "every gradient grows with the loss: let torch.amp.GradScaler lower the loss scale (here "
            f"{stats.scale:g}), divide the loss, keep this op in float32, or use {wider(fault.dtype)}; float16 ends at "
            f"{top:.6g}"
        )
    elif fault.exact_amax > top and is_cast(fault.where):
        hint = mend_cast(fault.where, f"{fault.dtype} ({top:.6g})")
    elif fault.exact_amax > top and format_of_values(fault.dtype).bits > 16:
        hint = f"scale its inputs down, or clamp them before this op: {fault.dtype} ends at {top:.6g}"
    elif fault.exact_amax > top == fault.amax_in and fault.where.op.startswith(_ADDS):
        hint = (
            "write a mask with where or masked_fill in place of adding it: nothing lies below the lowest number of the "
            f"format, {-top:.6g}"
        )
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
    return elements_lost(stats, CHECK, verdict, message + end, seen.lost, shown)


def _nothing_left(stats: NumericsStats) -> str:
    """That an infinity reaches nothing, as far as outputs were looked at."""
    unread = [reason for reason in stats.coverage.unseen if reason.startswith((UNCOMPARED, UNREAD, VALUELESS))]
    if unread:
        return f"; nothing of it is left in gradients; whether it is in {listed(unread)} was not looked at"
    return "; nothing of it is left in outputs or gradients"


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
    return [elements_lost(stats, CHECK, Verdict.FAIL, message, seen.exact_inf, Evidence(where=where, hint=hint))]


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
            findings.append(elements_lost(stats, CHECK, Verdict.FAIL, message, error.nonfinite, shown))
    return findings


_CAUSES = {
    faults.ZERO: "mend what becomes zero here: see silent-zero",
    faults.FLUSH: "mend what becomes too small here: see flush",
}


def _inside_graphs(stats: TelemetryStats, limits: Limits) -> list[Finding]:
    """Forward values that are not finite though computed from finite values."""
    harmed = stats.harmed
    forward, backward = in_phase(stats, "forward"), in_phase(stats, "backward")
    if not forward:
        return [CHECK.skip(stats.subject, "no forward value was measured inside compiled graphs")]
    findings = []
    for number, site in enumerate(forward):
        if harmed is False and not site.overflowed:
            continue  # the reference has it as well, or it is a mask: the outputs were judged to be right
        if not site.born or (site.fed and not site.overflowed and any(earlier.bad for earlier in forward[:number])):
            continue
        later = forward[number + 1 :] + backward
        carried = sum(bool(value.bad) for value in later)
        fails = (bool(carried) or not later) if harmed is None else harmed
        text = f"; {carried} later values carry it on" if carried else "; no later measured value is inf or NaN"
        message = (
            f"finite values must stay finite; {bad_elements(site)} of {value_text(site)} in {site.bad:,} of "
            f"{site.calls:,} measured calls{text if harmed is None or carried else ''}"
        )
        verdict = Verdict.FAIL if fails else Verdict.WARN
        hint = f"scale the inputs of this op down, or keep it in {wider(site.format)} "
        hint += "(torch.autocast(enabled=False) around it)"
        findings.append(finding(CHECK, verdict, stats, site, message, hint, site.bad, unit="calls"))
    return judged(CHECK, stats, findings, f"no value of {len(forward)} became inf or NaN in forward", forward)


def _compiled(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """No value inside the graphs, and no result, is inf or NaN where float64 is finite."""
    if not stats.beside:
        return []
    lost = [
        CHECK.fail(
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
    values = inside(CHECK, _inside_graphs, stats, limits)
    places = [one for one in values if not lost or one.verdict in (Verdict.FAIL, Verdict.WARN)]
    return first_findings(places + lost)  # the place first


def _of_losses(stats: FiniteStats, limits: Limits) -> list[Finding]:
    """Losses that low precision alone makes infinite or NaN; a passing overflow is none."""
    lost, first, place = stats.trailing, stats.overflowed, stats.place
    if first is not None and stats.undefined is None:
        hint = "nothing is learned from such a loss; look for the first op with the audit of the model in forward"
        hint = mend_nonfinite(place) if place else hint
        where = replace(place or Where("forward"), step=first)
        shown = Evidence(where=where, observed=lost, limit=0.0, unit="steps", hint=hint)
        return [CHECK.fail(stats.subject, returned_text(stats, first), **shown)]
    if first is not None or lost or not stats.losses:
        return []
    bad = sum(not math.isfinite(loss) for loss in stats.losses)
    text = f"the last of {len(stats.losses)} losses is finite" + (f", after {bad} that were not" if bad else "")
    return [CHECK.passed(stats.subject, text, len(stats.losses))]


_JUDGES: Judges = {
    NumericsStats: _of_run,
    TelemetryStats: _inside_graphs,
    AccuracyStats: _compiled,
    FiniteStats: _of_losses,
}


def check(stats: NumericsStats | TelemetryStats | AccuracyStats | FiniteStats, limits: Limits) -> list[Finding]:
    """Nothing is infinite or NaN where float64 is finite."""
    return _JUDGES[type(stats)](stats, limits)
