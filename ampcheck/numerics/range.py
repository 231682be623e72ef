"""Do the values fit the range of their format? Pure functions from `NumericsStats` to findings."""

from __future__ import annotations

from ampcheck.catalog.numerics import FLUSH, HEADROOM, INTEGER_CAST, NONFINITE_GRADIENT, OVERFLOW, SILENT_ZERO
from ampcheck.core.check import LISTED, first_findings
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.text import listed
from ampcheck.numerics.facts import OpFacts
from ampcheck.numerics.findings import (
    finding,
    incomplete,
    inside_graphs,
    inside_unseen,
    no_gradients,
    not_reached,
    nothing_narrow,
    passed,
    who,
)
from ampcheck.numerics.stats import NumericsStats, gradient_module


def check_overflow(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """No op makes an infinity or a NaN from finite inputs.

    A producer is named, its propagators are counted. It fails when the damage is seen beyond the op: in an output, a
    gradient, or where there is no reference to tell. What a clamp or a softmax absorbs is a warning. What float64
    produces at the same place too, from the same data, counts only when it reaches an output.
    """
    check = OVERFLOW
    if skipped := not_reached(stats, check):
        return [skipped]
    if stats.compiled:
        seen = _nonfinite_outputs(stats)
        inside = [f for f in inside_graphs(stats, check, limits) if f.verdict is not Verdict.PASS or not seen]
        return first_findings(inside + seen)  # the place first
    harmed = not stats.judged or stats.loss_nonfinite or bool(stats.harm(limits.precision))
    reached = sum(e.nonfinite for e in stats.errors if e.kind in ("output", "module"))
    found: list[Finding] = []
    for fact in stats.ops:
        # An inf - inf after a producer is its propagator; without one it is where the trouble is first seen.
        born = fact.produced or (0 if found else fact.spoiled)
        if not born:
            continue
        if fact.where in stats.reference_produced or (not stats.judged and not fact.limited):
            if stats.judged and stats.native and stats.reference_nonfinite:
                found.append(_own_arithmetic(stats, fact, born))
            continue
        message = (
            f"finite inputs must give finite outputs; {born:,} of {fact.numel:,} elements of {_op(fact)} "
            f"became inf or NaN in {fact.dtype} ({_cause(fact)})"
        )
        verdict = Verdict.FAIL if harmed or reached else Verdict.WARN
        filled = fact.amax_in == format_of(fact.dtype).max
        if verdict is Verdict.WARN and filled and fact.where.phase == "backward":
            continue  # a derivative of PyTorch's own (logcumsumexp) that masks by the lowest number, and exp absorbs it
        carried = sum(f.carried + f.spoiled for f in stats.ops if f.index > fact.index)
        if verdict is Verdict.WARN and not stats.reference_nonfinite:
            message += "; nothing of it is left in module outputs or gradients"
        elif carried:
            message += f"; {carried:,} further elements downstream carry it on"
        found.append(finding(stats, check, verdict, fact, message, _overflow_hint(fact), born, 0, "elements"))
    if not found:
        found = _nonfinite_outputs(stats)
    if not found and stats.reference_nonfinite and stats.uncompared:
        return [incomplete(stats, check, "no output is finite in the reference either: see nonfinite-reference")]
    calls = sum(fact.calls for fact in stats.ops)
    return first_findings(found) or [
        passed(stats, check, "no op or output became inf or NaN from finite inputs", calls, 0, 0, "elements")
    ]


def check_nonfinite_gradient(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Every gradient that is finite in the reference is finite here, at a loss scale that GradScaler settles on."""
    check = NONFINITE_GRADIENT
    if skipped := not_reached(stats, check) or no_gradients(stats, check):
        return [skipped]
    bad = [e for e in stats.errors if e.kind == "gradient" and e.nonfinite]
    if not bad and stats.reference_nonfinite and stats.uncompared:
        text = "no output is finite in the reference, and the default loss leaves all out: see nonfinite-reference"
        return [incomplete(stats, check, text)]
    if not bad:
        count = sum(e.kind == "gradient" and e.compared > 0 for e in stats.errors)
        if not count:
            return [incomplete(stats, check, f"no gradient is finite in {stats.reference}: see nonfinite-reference")]
        text = f"{count} gradients are finite where float64's are, at loss scale {stats.scale:g}"
        return [passed(stats, check, text, count, 0, 0, "gradients"), *_cut_off(stats)]
    first = bad[-1]  # backward runs from the last parameter to the first
    message = (
        f"gradients must be finite where float64's are; {len(bad)} of "
        f"{sum(e.kind == 'gradient' for e in stats.errors)} are not, at loss scale {stats.scale:g}, nearest to the "
        f"loss {first.name}"
    )
    where = Where(phase="backward", module=gradient_module(first.name))
    hint = "see overflow for the op that made the first infinity; a smaller loss scale cannot mend a forward overflow"
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
        "a reentrant checkpoint gives none where its inputs need none (use_reentrant=False); for weights that run "
        "under no_grad on purpose set requires_grad_(False)"
    )
    return [incomplete(stats, NONFINITE_GRADIENT, reason, hint)]


def check_headroom(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Nothing comes near the end of its format: a warning where a value lies within a factor of the maximum."""
    check = HEADROOM
    if skipped := not_reached(stats, check):
        return [skipped]
    if stats.compiled:
        return inside_graphs(stats, check, limits)
    if skipped := nothing_narrow(stats, check):
        return [skipped]
    found, closest, judged = [], 0.0, 0
    for fact in stats.ops:
        top = format_of(fact.dtype).max
        if fact.where.phase == "backward" and stats.scale != 1:
            continue  # how large a scaled gradient is follows from the scale, and GradScaler backs off
        # A constant near the end, such as the mask finfo.min, goes in as it comes out: nothing grew here.
        if fact.amax_in * limits.headroom > top or fact.produced or fact.spoiled or fact.carried:
            continue
        closest, judged = max(closest, fact.amax / top), judged + fact.calls
        if fact.amax * limits.headroom > top:
            message = (
                f"values must stay {limits.headroom:g}x below the maximum of {fact.dtype}; {_op(fact)} reaches "
                f"{fact.amax:.5g}, {top / fact.amax:.2f}x below {top:.6g}"
            )
            hint = "normalise or scale before this op, or keep it in bfloat16 or float32"
            found.append(
                finding(
                    stats, check, Verdict.WARN, fact, message, hint, top / fact.amax, limits.headroom, "x below max"
                )
            )
    room = 1 / closest if closest else float("inf")
    text = f"the largest value lies {room:.3g}x below the maximum of its format"
    return first_findings(found) or [passed(stats, check, text, judged, room, limits.headroom, "x below max")]


def check_flush(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """No tensor loses a part of its norm to zero that is larger than a rounding.

    Elements are compared with the same op on the same inputs in float64. It fails when an output or gradient has moved
    beyond rounding as well; it warns where more than half of the nonzero elements are gone and a gradient (in forward
    also a module's output) is off that is small within the whole.
    """
    check = FLUSH
    if skipped := not_reached(stats, check):
        return [skipped]
    if stats.compiled:
        return inside_graphs(stats, check, limits)
    if skipped := nothing_narrow(stats, check):
        return [skipped]
    harmed = not stats.judged or bool(stats.harm(limits.precision))
    found, worst = [], 0.0
    for fact in stats.ops:
        if not fact.flushed or fact.emptied:
            continue
        allowed = limits.flush * format_of(fact.dtype).unit_roundoff
        worst = max(worst, fact.flushed_share)
        if fact.flushed_share <= allowed:
            continue
        if harmed or (2 * fact.flushed > fact.nonzero and stats.traced(fact.where, limits.precision)):
            message = (
                f"at most {allowed:.2g} of a tensor's norm may flush to zero; {_op(fact)} lost "
                f"{fact.flushed_share:.2g} "
                f"in {fact.dtype}: {fact.flushed:,} of {fact.nonzero:,} nonzero elements"
            )
            verdict = Verdict.FAIL if harmed else Verdict.WARN
            found.append(
                finding(
                    stats, check, verdict, fact, message, _flush_hint(fact), fact.flushed_share, allowed, "of the norm"
                )
            )
    lost, alive = sum(f.flushed for f in stats.ops), sum(f.nonzero for f in stats.ops)
    text = f"{lost:,} of {alive:,} nonzero elements flushed to zero, no tensor by more than {worst:.2g} of its norm"
    allowed = limits.flush * stats.unit_roundoff
    return first_findings(found) or [passed(stats, check, text, alive, worst, allowed, "of the norm")]


def check_silent_zero(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """No tensor becomes zero as a whole, and no constant vanishes where it was needed.

    The guard `eps=1e-8` is zero in float16: `0 + eps` stays 0. A vanishing constant counts when the sum really was
    zero.
    """
    check = SILENT_ZERO
    if skipped := not_reached(stats, check):
        return [skipped]
    if stats.compiled:
        return inside_graphs(stats, check, limits)
    if skipped := nothing_narrow(stats, check):
        return [skipped]
    harmed = not stats.judged or bool(stats.harm(limits.precision))
    found = []
    for fact in stats.ops:
        needed = fact.constant is not None and fact.flushed > 0
        if not needed and not (fact.emptied and (harmed or stats.traced(fact.where, limits.precision))):
            continue
        smallest = format_of(fact.dtype).smallest_subnormal
        if needed:
            message = (
                f"constants must be representable where they guard; {fact.constant:g} in {_op(fact)} is zero in "
                f"{fact.dtype}, whose smallest value is {smallest:.2g}, and {fact.flushed:,} results are exactly 0"
            )
            hint = (
                f"use an eps of at least {_safe_eps(fact.dtype):.1g} in {fact.dtype}, or compute the guard in float32"
            )
        else:
            message = (
                f"a tensor must not vanish; all {fact.numel // fact.calls:,} results of {_op(fact)} are 0 in "
                f"{fact.dtype}, "
                f"whose smallest value is {smallest:.2g}, and float64's are not ({fact.emptied} of {fact.calls} calls)"
            )
            hint = _flush_hint(fact)
        verdict = Verdict.FAIL if harmed else Verdict.WARN
        if verdict is Verdict.WARN:
            message += "; what it moves is within the rounding of the whole"
        found.append(finding(stats, check, verdict, fact, message, hint, fact.flushed, 0, "elements"))
    text = "no tensor and no needed constant became zero"
    return first_findings(found) or [passed(stats, check, text, stats.low, 0, 0, "elements")]


def check_integer_cast(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Integers survive in floats: positions, ids and counters beyond 2^p do not.

    It fails where different integers become equal on their way to an output or buffer, and where an output or gradient
    has moved beyond rounding as well; else it warns.
    """
    check = INTEGER_CAST
    if skipped := not_reached(stats, check):
        return [skipped]
    if stats.compiled:
        return inside_unseen(stats, check)
    # Positions are exact data: a model that is sensitive to them excuses no rounding of them.
    harmed = not stats.judged or bool(stats.harm(limits.precision)) or stats.inexact_outputs(limits.precision)
    found = []
    for fact in stats.ops:
        if not (fact.inexact or fact.collided):
            continue
        exact = f"{fact.dtype} holds every integer up to {format_of(fact.dtype).largest_exact_integer} only"
        if fact.collided:
            message = f"different integers must stay different; {_op(fact)} makes {fact.collided:,} equal to another"
        else:
            message = f"integers must survive a cast; {fact.inexact:,} of {fact.numel:,} in {_op(fact)} do not"
        wider = "float64" if fact.dtype == "float32" else "float32"
        hint = f"keep positions, ids and counters in an integer dtype or {wider}, and cast the result, not the integer"
        verdict = Verdict.FAIL if harmed or (fact.collided and fact.used) else Verdict.WARN
        lost = fact.collided or fact.inexact
        found.append(finding(stats, check, verdict, fact, f"{message}: {exact}", hint, lost, 0, "elements"))
    if not found and not stats.casts:
        return [check.skip(who(stats), "no cast between integers and floats was seen")]
    text = f"every integer survived {stats.casts} casts between integers and floats"
    return first_findings(found) or [passed(stats, check, text, stats.casts, 0, 0, "elements")]


def _own_arithmetic(stats: NumericsStats, fact: OpFacts, born: int) -> Finding:
    """Float64 makes the same infinities, and they reach an output.

    In a model under autocast that is its own affair: a mask, a log of zero. A model kept in 16 bits hands its data to
    the reference, so an infinity there may come from a value that the 16 bits had already lost.
    """
    message = (
        f"finite inputs must give finite outputs; {born:,} of {fact.numel:,} elements of {_op(fact)} are inf or NaN, "
        f"in float64 too, given the {stats.format} weights and buffers that the model holds"
    )
    zeros = ", ".join(stats.zeroed_buffers) or "none"
    hint = f"a value that {stats.format} cannot hold may divide; its buffers with an exact zero: {zeros}"
    return finding(stats, OVERFLOW, Verdict.FAIL, fact, message, hint, born, 0, "elements")


def _cause(fact: OpFacts) -> str:
    if fact.limited:
        return f"float64 stays finite on the same inputs, whose largest magnitude is {fact.amax_in:.5g}"
    if fact.limited is False:
        return "its inputs had already lost the values that keep float64 finite here"
    return f"the largest magnitude going in is {fact.amax_in:.5g}"


def _overflow_hint(fact: OpFacts) -> str:
    if fact.limited is False:  # a root of what became negative, a quotient of zeros
        return (
            "mend what its inputs lost: see silent-zero and precision-loss before this op, or compute them in float32"
        )
    wider = "" if fact.dtype == "bfloat16" else ", or use bfloat16"
    return (
        "keep this op in float32 (torch.autocast(enabled=False) around it and .float() on its inputs), scale its "
        f"inputs down{wider}; {fact.dtype} ends at {format_of(fact.dtype).max:.6g}"
    )


def _nonfinite_outputs(stats: NumericsStats) -> list[Finding]:
    """What of the outputs is not finite although float64 is."""
    found = []
    for error in stats.errors:
        if error.kind == "output" and error.nonfinite:
            message = (
                f"outputs must be finite where float64's are; {error.nonfinite:,} elements of output "
                f"{error.name or '(the only one)'} are inf or NaN in {error.dtype}"
            )
            hint = (
                "the values inside the graphs tell where; compile=False names the op"
                if stats.compiled
                else "no op was seen to make them: look at what is not measured"
            )
            where = Where(phase="forward")
            found.append(
                OVERFLOW.fail(
                    who(stats), message, where=where, observed=error.nonfinite, limit=0, unit="elements", hint=hint
                )
            )
    if stats.loss_nonfinite:
        message = f"a loss must be finite where float64's is; that of the subject is inf or NaN in {stats.format}"
        hint = "compute the loss from output.float(), or under torch.autocast(enabled=False)"
        found.append(OVERFLOW.fail(who(stats), message, where=Where(phase="forward"), observed=1, limit=0, hint=hint))
    return found


def _flush_hint(fact: OpFacts) -> str:
    if fact.where.phase == "backward":
        return "scale the loss (torch.amp.GradScaler), use bfloat16, or keep this op in float32"
    return "scale the values up before this op, use bfloat16, or keep it in float32"


def _safe_eps(dtype: str) -> float:
    """An eps whose square root's reciprocal and whose own value are both normal numbers of the format."""
    return format_of(dtype).smallest_normal


def _op(fact: OpFacts) -> str:
    return fact.where.op.removeprefix("aten::")
