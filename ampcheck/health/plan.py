"""The counts to take of a tensor of a dtype, and the conversion of a packed vector of counts into a TensorHealth.

Every count is "magnitudes below a limit". An implementation (oracle, CPU, Triton) fills one float64 vector:

    below(smallest positive), below(smallest normal), below(infinity), not NaN,
    amax, amin, sum of squares, and the bins of the histogram, if any.

Differences of counts give the record, so that no implementation depends on the meaning of a count.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.records.health import TensorHealth

_COUNT_PLACES = 4

FINITE, AMAX, AMIN = 2, _COUNT_PLACES, _COUNT_PLACES + 1
"""Places in a packed vector."""


def carrier_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which elements of ``dtype`` are measured: its own, or one that holds every value exactly.

    Eight-bit floats are widened to float32. Integers and booleans go to float64, exact up to 2**53.
    """
    if not dtype.is_floating_point:
        return torch.float64
    return dtype if dtype in (torch.float64, torch.bfloat16, torch.float16) else torch.float32


@dataclass(frozen=True, slots=True)
class Plan:
    """The limit for one dtype: a magnitude below `smallest_normal` is zero or subnormal."""

    carrier: torch.dtype
    smallest_normal: float
    histogram: bool

    @property
    def format(self) -> FloatFormat:
        """Format of the carrier."""
        return format_of(self.carrier)

    @property
    def exponents(self) -> range:
        """Exponents of the histogram's bins: all that the carrier's finite nonzero values can have."""
        carrier = self.format
        first, last = carrier.min_exponent - carrier.mantissa_bits, carrier.min_exponent + (1 << carrier.exponent_bits)
        return range(first, last - 2) if self.histogram else range(0)

    @property
    def width(self) -> int:
        """Length of the packed vector."""
        return _COUNT_PLACES + 3 + len(self.exponents)

    @property
    def normal_code(self) -> int:
        """The bit pattern of the smallest normal value in the carrier: patterns without sign rise with magnitude."""
        return self.format.encode(self.smallest_normal)

    def unpack(self, packed: Sequence[float], dtype: str, numel: int, unstored: int = 0) -> TensorHealth:
        """Return the record of ``numel`` elements, given their packed vector.

        ``unstored`` of them are zeros that the vector does not count.
        """
        zeros, below_normal, finite, numbers = (int(value) for value in packed[:_COUNT_PLACES])
        amax, amin, sumsq = packed[_COUNT_PLACES : _COUNT_PLACES + 3]
        bins = zip(self.exponents, packed[_COUNT_PLACES + 3 :], strict=True)
        return TensorHealth(
            dtype,
            numel,
            zeros=zeros + unstored,
            subnormals=below_normal - zeros,
            infs=numbers - finite,
            nans=numel - unstored - numbers,
            amax=amax,
            amin=amin,
            sumsq=sumsq,
            histogram=tuple((exponent, int(count)) for exponent, count in bins if count) if self.histogram else None,
        )


@functools.lru_cache(maxsize=256)
def plan_for(dtype: torch.dtype, histogram: bool) -> Plan:
    """Return the plan for a dtype."""
    carrier = carrier_of(dtype)
    own = format_of(dtype if dtype.is_floating_point else carrier)
    return Plan(carrier, own.smallest_normal, histogram)
