"""Bounds that are meant to guard and that decide: a floor under a divisor, the end of a format before a cast to it."""

from __future__ import annotations

from dataclasses import replace

import torch

from ampcheck.core.formats import FORMATS
from ampcheck.records import faults
from ampcheck.records.faults import Fault
from ampcheck.records.results import Examination
from ampcheck.shadow.call import Call
from ampcheck.shadow.cause import fault_at

_LARGEST_FLOOR = torch.finfo(torch.float32).eps ** 0.5
"""The largest floor that counts as a guard: float32 rounds its square away beside 1."""

_DECIDES = 0.5
"""The part of the values from which a bound decides: most of them."""

_CUT = 0.25
"""The part of the norm of values from which the end of a format of 8 bits decides: less than two bits are left. Their
scale is to bring values into the format; whoever clamps to 65504 means the rare value."""

_EIGHT = [form for form in FORMATS.values() if form.bits == 8 and form.mantissa_bits]

_SMALLEST = frozenset(
    [2 * form.unit_roundoff for form in FORMATS.values() if form.bits == 16]
    + [least for form in _EIGHT for least in (form.smallest_normal, form.smallest_subnormal)]
)
"""The spacing at 1 of each format of 16 bits, and the smallest numbers of 8 bits, to which code clamps scales that it
keeps in them. The spacing of narrower formats is 0.125 and larger, which code has for other reasons too; the smallest
numbers of 16 bits are below the largest floor."""

_ENDS = frozenset(form.max for form in FORMATS.values() if form.bits in (8, 16) and form.mantissa_bits)
"""Those of narrower formats, such as 6 and 28, are also those of `relu6` and of much else."""

_ENDS_OF_EIGHT = frozenset(form.max for form in _EIGHT)


def divisors(call: Call) -> slice:
    """Which floating inputs an op divides by."""
    return slice(len(call.before) - 1, None) if call.traits.divides in (("other",), ("self",)) else slice(0, 0)


def bound_that_decides(call: Call, tensor: torch.Tensor) -> tuple[Fault, bool] | None:
    """A bound of a `clamp` that decides the values of the run, and whether it is the end of a format, or None."""
    value = call.kept if call.written else next((t.detach() for t in call.inputs), None)
    if value is None:
        return None
    low, high = (_number(call.argument(name)) for name in ("min", "max"))
    seen, note = _floor(value, low), f"floor {low:.6g}" if low else ""
    is_end = seen is None
    if is_end:
        seen, note = _end(value, high), f"end {high:.6g}" if high else ""
    if seen is None:
        return None
    fault = fault_at(faults.BOUND, call, tensor, seen)
    return replace(fault, elements=seen.lost, note=note, examination=replace(seen, lost=0)), is_end


def _floor(value: torch.Tensor, low: float | None) -> Examination | None:
    """What a floor takes the place of, where that is most values. Zeros are what a floor is for."""
    if low is None or not (0 < low <= _LARGEST_FLOOR or low in _SMALLEST):
        return None
    return _most(value, (value < low) & (value > 0))


def _end(value: torch.Tensor, high: float | None) -> Examination | None:
    """What the end of a format takes the place of, where that is most values, or, of 8 bits, most of their digits."""
    if high not in _ENDS:
        return None
    beyond = value.abs() > high
    most = _most(value, beyond)
    if most is not None or high not in _ENDS_OF_EIGHT or not bool(beyond.any()):
        return most
    wide = value.double()
    cut = float(torch.linalg.vector_norm((wide.abs() - high).clamp(min=0)) / torch.linalg.vector_norm(wide))
    count, known = int(beyond.sum()), int(value.count_nonzero())
    return Examination(known, lost=count, error=cut, limit=_CUT, impact=cut) if cut > _CUT else None


def _most(value: torch.Tensor, beyond: torch.Tensor) -> Examination | None:
    count, known = int(beyond.sum()), int(value.count_nonzero())
    return Examination(known, lost=count, error=count / known, limit=_DECIDES) if count > _DECIDES * known else None


def _number(bound: object) -> float | None:
    return bound if isinstance(bound, (int, float)) else None
