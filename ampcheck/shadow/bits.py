"""Memory of one floating format that is read in another of the same width: float16 and bfloat16, or two of 8 bits.

The companions of such memory keep the numbers that its bits meant, so what is computed from the wrong ones is found,
and bits that are only carried in another format, and read in their own again, are right throughout. Only numbers that
the run has rounded show what their bits mean: data, which no rounding has touched, may be bits of any format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ampcheck.shadow.memory import roundoff, values_in, view_of, write_view

if TYPE_CHECKING:
    from ampcheck.shadow.companions import Companions

BITS = "bits of another format"
"""The kind of a fault, and the sort of a suspect, see `ampcheck.shadow.faults` and `ampcheck.shadow.suspects`."""

_FAR = 0.25
"""The error, relative to a number, from which its bits are read as another."""

_READ_AS_ANOTHER = (
    (torch.float16, torch.bfloat16),
    (torch.float8_e4m3fn, torch.float8_e5m2),
    (torch.float8_e4m3fn, torch.float8_e5m2fnuz),
    (torch.float8_e4m3fnuz, torch.float8_e5m2),
    (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
"""Formats with exponents of different widths. Those of one width differ by a power of two, which a scale may hold."""


def reads_as_another(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether the bits of a number of one format are another number in the other."""
    return (dtype, other) in _READ_AS_ANOTHER or (other, dtype) in _READ_AS_ANOTHER


def read_as(companions: Companions, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """Read the memory of companions in another format from now on.

    Numbers that are exact in the old format are data, and enter with their values in the new one. All others keep what
    they meant.
    """
    values, old = companions.values, companions.dtype
    with torch.inference_mode(False), torch.no_grad():
        before, now = (values_in(storage, d, values.exact.device) for d in (old, dtype))
        wide = before.double()
        data = (values.exact == wide) | (values.exact.isnan() & wide.isnan())
        sides = [torch.where(data, now.to(side.dtype), side) for side in (values.exact, values.moved)]
    companions.own()
    companions.values.exact, companions.values.moved = sides
    companions.dtype, companions.unit = dtype, max(companions.unit, roundoff(dtype))
    if companions.bytes is not None:
        companions.bytes = now.clone()
    companions.foreign = old if bool(_is_far(now, sides[0]).any()) else None
    if companions.foreign is None:  # they were carried, and are read in their own format again
        companions.faults = frozenset(key for key in companions.faults if key[0] != BITS)
        companions.suspects = {sort: key for sort, key in companions.suspects.items() if sort != BITS}


def copy_bits(tensor: torch.Tensor, target: Companions, source: torch.Tensor, companions: Companions) -> bool:
    """Follow a copy of a part of the bits in one storage to a part of another; False where widths differ.

    tensor, source: the integers; target, companions: those of the numbers in their memory.
    """
    if target.rows or companions.rows or target.dtype.itemsize != companions.dtype.itemsize:
        return False
    try:
        tensor, source = tensor.view(companions.dtype), source.view(companions.dtype)
    except RuntimeError:  # bytes, of which some may be parts of a number
        return False
    if reads_as_another(companions.dtype, target.dtype):
        read_as(companions, source.untyped_storage(), target.dtype)
    target.own()
    write_view(tensor, target.values.exact, view_of(source, companions.values.exact))
    write_view(tensor, target.values.moved, view_of(source, companions.values.moved))
    target.unit, target.depth = max(target.unit, companions.unit), max(target.depth, companions.depth)
    target.whole = target.whole and companions.whole
    target.faults |= companions.faults
    target.suspects = {**target.suspects, **companions.suspects}
    target.foreign = companions.foreign or target.foreign
    return True


def holds_another(tensor: torch.Tensor, exact: torch.Tensor, companions: Companions) -> bool:
    """Whether a tensor has bits of another format than its own."""
    return companions.foreign is not None and bool(_is_far(tensor, exact).any())


def _is_far(values: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    error = (values.to(exact.dtype) - exact).abs()
    return ~(error <= _FAR * exact.abs()) & ~exact.isnan()
