"""Range and precision of values in low precision: what the checks of this family share, above all their words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from ampcheck.core.check import Check, Evidence, first_findings
from ampcheck.core.formats import format_of_values
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.source import op_name
from ampcheck.core.text import at_scale, counted, listed
from ampcheck.records.faults import Fault
from ampcheck.records.finite import FiniteStats
from ampcheck.records.numerics import NumericsStats
from ampcheck.records.results import ResultError

Judges: TypeAlias = Mapping[type, Callable[[Any, Any], list[Finding]]]
"""For each record that a check judges, the function that does."""

_CASTS = ("aten::_to_copy", "aten::copy_", "prims::convert_element_type")
_OFF = "torch.autocast(device, enabled=False)"


def left_out(stats: NumericsStats, check: Check, *, narrow: bool = False) -> list[Finding]:
    """A skip where the run did not come to its end, or `narrow`, of what 16 bits lose, computed in none."""
    if stats.raised is not None:
        return [check.skip(stats.name, "the run raised before it was complete: see low-precision-error")]
    if narrow and not stats.low:
        return [check.skip(stats.name, "no op computed in 16 bits, so nothing was judged")]
    return []


def op_text(stats: NumericsStats, where: Where) -> str:
    """``rsub in `sigma = 1 - alpha` ``: the op as its source line calls it, or else without the namespace of PyTorch's
    own, and the text of that line where it is known."""
    op, text = op_name(where), stats.sources.get((where.file, where.line), "")
    part = "the backward pass at " if where.phase == "backward" else ""
    return f"{op} in {part}`{text if len(text) <= 100 else text[:97] + '...'}`" if text else op


def range_text(fault: Fault) -> str:
    """The magnitudes that go into an op and come out of it."""
    if 0 < fault.examination.numel <= fault.examination.lost:
        return f"inputs reach {fault.amax_in:.5g} and no result is finite; float64 reaches {fault.exact_amax:.5g}"
    text = f"magnitudes up to {fault.amax_in:.5g} go in, up to {fault.amax_out:.5g} come out"
    return text if fault.exact_amax == fault.amax_out else f"{text} ({fault.exact_amax:.5g} in float64)"


def reach_text(stats: NumericsStats, fault: Fault) -> str:
    """Where the damage is left, and that the code itself chose the format, where the run has another of 16 bits."""
    places = sorted(fault.reaches, key=lambda name: -fault.reaches[name])
    halves = {"float16", "bfloat16"}
    own = bool(stats.arm) and fault.dtype != stats.format and {fault.dtype, stats.format} <= halves
    chosen = f"; the code itself casts to {fault.dtype}, this run is in {stats.format}" if own else ""
    return chosen + (f"; it reaches {listed(places, 3)}" if places else "")


def is_cast(where: Where) -> bool:
    """Return whether an op does nothing but convert values."""
    return where.op.removesuffix(".default") in _CASTS


def mend_cast(where: Where, format_text: str) -> str:
    """The hint for a cast that overflows. format_text: what it casts to."""
    here = f"module {where.module}" if where.module else f"{where.file}:{where.line}" if where.file else "that op"
    return (
        f"the cast overflows: it is given values beyond the largest of {format_text}; normalise or clamp them before "
        f"it, or keep {here} in float32 (with torch.autocast(enabled=False) around it)"
    )


def wider(dtype: str) -> str:
    """The formats that have a larger range."""
    return "bfloat16 or float32" if format_of_values(dtype).name == "float16" else "float32"


def faults_of(stats: NumericsStats, kinds: Iterable[str]) -> list[Fault]:
    """The faults of these kinds."""
    return [fault for fault in stats.faults if fault.kind in kinds]


def passed(
    stats: NumericsStats,
    check: Check,
    text: str,
    seen: int,
    observed: float | None = None,
    limit: float | None = None,
    unit: str = "",
) -> Finding:
    """A pass that rests on `seen` observations, with the coverage of the run."""
    text = f"{text} ({stats.coverage})"
    return check.passed(stats.name, text, seen, observed=observed, limit=limit, unit=unit)


def elements_lost(
    stats: NumericsStats, check: Check, verdict: Verdict, message: str, count: int, shown: Evidence
) -> Finding:
    """A failure or warning about `count` elements, of which none may be so."""
    shown |= {"observed": count, "limit": 0, "unit": "elements"}
    return check.finding(verdict, stats.name, message, **shown)


def no_gradients(stats: NumericsStats, check: Check) -> Finding | None:
    """A skip where nothing needs a gradient; incomplete where the subject keeps backward from its weights."""
    if not stats.no_backward and stats.of("gradient"):
        return None
    reason = f"no gradients to judge: {stats.no_backward or 'the run gave no gradient'}"
    if stats.no_backward and not stats.prevented:
        return check.skip(stats.name, reason)
    hint = (
        "mend what raises or cuts the graph (no_grad, detach, a reentrant checkpoint whose inputs need no gradient); "
        "for a model that is never trained set requires_grad_(False)"
    )
    return check.incomplete(stats.name, reason, hint=hint)


def is_scaled(stats: NumericsStats, where: Where) -> bool:
    """Return whether the size of values follows from the loss scale."""
    return where.phase == "backward" and stats.scale != 1


def vanished(stats: NumericsStats, check: Check, kept: list[Fault], text: str) -> list[Finding]:
    """The faults by which values that reach something are lost to zero, or a pass."""
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
        f"keep this op in {wider(fault.dtype)}, or scale the values up before it; an eps must be at least {safe:.1g} "
        f"in {fault.dtype}, and changes the result then"
    )


def lost_text(error: ResultError) -> str:
    """An output or loss with infinities or NaN that exact does not have."""
    name = "the loss" if error.kind == "loss" else f"output {error.name or '(the only one)'}"
    return (
        f"outputs must be finite where float64's are; {error.nonfinite:,} elements of {name} are inf or NaN in "
        f"{error.dtype}"
    )


def lost_gradients_text(bad: Sequence[ResultError], gradients: Sequence[ResultError], scale: float) -> str:
    """Gradients with infinities or NaN that exact does not have; backward runs from the last one to the first."""
    return (
        f"gradients must be finite where float64's are; {len(bad)} of {len(gradients)} are not, {at_scale(scale)}, "
        f"nearest to the loss {bad[-1].name}"
    )


def finite_gradients_text(count: int, scale: float) -> str:
    """All gradients are finite."""
    return f"{counted(count, 'gradients')} are finite where float64's are, {at_scale(scale)}"


def beyond_text(worst: ResultError, beyond: Sequence[ResultError], judged: Sequence[ResultError], limit: float) -> str:
    """Results of one kind that lie further from exact than rounding explains."""
    return (
        f"{worst.kind}s must lie within {limit:.2g} of float64; {worst} lies {worst.error:.2g} away, and {len(beyond)} "
        f"of {len(judged)} are beyond their limits; the data's own rounding explains {worst.seen.spread:.2g}"
    )


def within_text(worst: ResultError) -> str:
    """All results lie within their limits."""
    return f"at most {worst.error:.2g} from float64, in {worst}"


def returned_text(stats: FiniteStats, first: int) -> str:
    """Return what the steps returned from step `first` on, none of it finite."""
    return (
        f"what a step returns must be finite; from step {first} on each of {stats.trailing} steps returned "
        f"{stats.losses[-1]}{first_op(stats.place)}"
    )


def first_op(place: Where | None) -> str:
    """The op in which a value first became infinite or NaN, where it is known."""
    return f"; the first value that is not finite comes from {place}" if place else ""


def mend_nonfinite(place: Where) -> str:
    """The hint for an op that makes infinities or NaNs of finite values, by what sort of op it is and where it runs."""
    here = f"module {place.module}" if place.module else f"{place.file}:{place.line}" if place.file else "that op"
    if is_cast(place):
        return mend_cast(place, "the narrow format (65504 in float16)")
    if place.module or place.phase == "backward":
        return f"keep {here} in float32 (with {_OFF}, on float32 inputs), or make what {place.op} is given smaller"
    return "compute and sum the loss in float32 (output.float() before it), or take a mean instead of a sum"
