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

_CUTS = {form.max: form.unit_roundoff for form in _EIGHT}
"""By the end of a format of 8 bits, the part of the norm of values that its rounding takes at the most: from there on
the end decides. A scale is to bring values into the format; whoever clamps to 65504 means the rare value."""


def divisors(call: Call) -> slice:
    """Which floating inputs an op divides by."""
    return slice(len(call.before) - 1, None) if call.traits.divides in (("other",), ("self",)) else slice(0, 0)


def bound_that_decides(call: Call, tensor: torch.Tensor) -> tuple[Fault, bool] | None:
    """A bound of a `clamp` that most values of the run do not keep, and whether it is the end of a format, or None.

    Zeros are what a floor is for.
    """
    value, low, high = _clamped(call)
    if value is None:
        return None
    if low is not None and (0 < low <= _LARGEST_FLOOR or low in _SMALLEST):
        count = int(((value < low) & (value > 0)).sum())
        if count > _DECIDES * int(value.count_nonzero()):
            return _fault(call, tensor, value, count, f"floor {low:.6g}"), False
    if high in _ENDS:
        count = int((value.abs() > high).sum())
        if count > _DECIDES * int(value.count_nonzero()):
            return _fault(call, tensor, value, count, f"end {high:.6g}"), True
    return None


def end_that_cuts(call: Call, tensor: torch.Tensor) -> Fault | None:
    """The end of a format of 8 bits at which a `clamp` takes more than the format rounds, or None. It does harm where a
    cast to that format follows: 448 is a size of images, too."""
    value, _, high = _clamped(call)
    if value is None or high not in _CUTS or not bool((beyond := value.abs() > high).any()):
        return None
    wide = value.double()
    cut = float(torch.linalg.vector_norm((wide.abs() - high).clamp(min=0)) / torch.linalg.vector_norm(wide))
    if not cut > _CUTS[high]:
        return None
    fault = _fault(call, tensor, value, int(beyond.sum()), f"end {high:.6g}")
    return replace(
        fault, amax_out=high, examination=replace(fault.examination, error=cut, limit=_CUTS[high], impact=cut)
    )


def _clamped(call: Call) -> tuple[torch.Tensor | None, float | None, float | None]:
    """Return the values that a clamp takes, and its bounds that are numbers."""
    value = call.kept if call.written else next((t.detach() for t in call.inputs), None)
    return value, _number(call.argument("min")), _number(call.argument("max"))


def _fault(call: Call, tensor: torch.Tensor, value: torch.Tensor, count: int, note: str) -> Fault:
    known = int(value.count_nonzero())
    fault = fault_at(faults.BOUND, call, tensor, Examination(known, error=count / known, limit=_DECIDES))
    return replace(fault, elements=count, note=note)


def _number(bound: object) -> float | None:
    return bound if isinstance(bound, (int, float)) else None
