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

_SMALLEST = frozenset(2 * form.unit_roundoff for form in FORMATS.values() if form.bits == 16)
"""The spacing at 1 of each format of 16 bits. Narrower formats have 0.125 and larger, which code has for other reasons
too; the smallest normal numbers of 16 bits are below the largest floor."""

_ENDS = frozenset(form.max for form in FORMATS.values() if form.bits in (8, 16) and form.mantissa_bits)
"""Those of narrower formats, such as 6 and 28, are also those of `relu6` and of much else."""


def divisors(call: Call) -> slice:
    """Which floating inputs an op divides by."""
    return slice(len(call.before) - 1, None) if call.traits.divides in (("other",), ("self",)) else slice(0, 0)


def bound_that_decides(call: Call, tensor: torch.Tensor) -> tuple[Fault, bool] | None:
    """A bound of a `clamp` that most values of the run do not keep, and whether it is the end of a format, or None.

    Zeros are what a floor is for.
    """
    value = call.kept if call.written else next((t.detach() for t in call.inputs), None)
    if value is None:
        return None
    low, high = (_number(call.argument(name)) for name in ("min", "max"))
    if low is not None and (0 < low <= _LARGEST_FLOOR or low in _SMALLEST):
        beyond, judged, is_end = (value < low) & (value > 0), value != 0, False
    elif high in _ENDS:
        beyond, judged, is_end = value.abs() > high, value != 0, True
    else:
        return None
    count, known = int(beyond.sum()), int(judged.sum())
    if count <= _DECIDES * known:
        return None
    bound = high if is_end else low
    seen = Examination(known, error=count / known, limit=_DECIDES)
    fault = fault_at(faults.BOUND, call, tensor, seen)
    return replace(fault, elements=count, note=f"{'end' if is_end else 'floor'} {bound:.6g}"), is_end


def _number(bound: object) -> float | None:
    return bound if isinstance(bound, (int, float)) else None
