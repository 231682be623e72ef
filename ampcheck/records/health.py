"""The statistics of one pass over a tensor, as a record that merges across tensors, steps and ranks."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from ampcheck.core.errors import UsageError

MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class TensorHealth:
    """The numerical state of one tensor, or of many merged with ``+``. Plain Python numbers throughout.

    ``dtype`` is the torch dtype without its prefix, ``"mixed"`` after a merge of several. ``amax`` is the largest
    finite magnitude (0.0 if there is none), ``amin`` the smallest nonzero finite magnitude (infinity if there is none),
    ``sumsq`` the sum of squares of the finite elements in float64 (infinite where that overflows, as only float64
    elements can make it). ``subnormals`` refers to the tensor's own dtype.

    ``histogram`` is ``None`` where it was not measured, else pairs ``(exponent, count)`` in rising order, without
    empty bins: nonzero finite elements by ``floor(log2(|x|))``, subnormals by their true exponent.

    The merge is associative (``sumsq`` up to rounding) and commutative. A record without elements is its identity; a
    histogram survives it only where both sides have one, since a partial count would understate.
    """

    dtype: str
    numel: int
    zeros: int
    subnormals: int
    infs: int
    nans: int
    amax: float
    amin: float
    sumsq: float
    histogram: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def empty(cls, dtype: str = MIXED) -> TensorHealth:
        """Return the record without elements: the identity of the merge."""
        return cls(dtype, 0, 0, 0, 0, 0, amax=0.0, amin=math.inf, sumsq=0.0, histogram=())

    @property
    def nonfinite(self) -> int:
        """Number of infinities and NaNs."""
        return self.infs + self.nans

    @property
    def finite(self) -> int:
        """Number of elements that are neither infinite nor NaN."""
        return self.numel - self.nonfinite

    @property
    def nonzero(self) -> int:
        """Number of nonzero finite elements, to which ``amin`` and the histogram refer."""
        return self.finite - self.zeros

    @property
    def norm(self) -> float:
        """Euclidean norm of the finite elements."""
        return math.sqrt(self.sumsq)

    @property
    def rms(self) -> float:
        """Root mean square of the finite elements, 0.0 if there is none."""
        return math.sqrt(self.sumsq / self.finite) if self.finite else 0.0

    def quantile_exponent(self, q: float) -> int | None:
        """Return the smallest exponent e such that a share ``q`` of the nonzero finite elements is below 2**(e + 1).

        ``None`` where there is no nonzero finite element. Raises ``UsageError`` for a record without a histogram and
        for ``q`` outside 0 to 1.
        """
        if self.histogram is None:
            raise UsageError("Quantiles need the exponent histogram; measure with histogram=True.")
        if not 0.0 <= q <= 1.0:
            raise UsageError(f"A quantile lies between 0 and 1; got {q!r}.")
        whole, seen = sum(count for _, count in self.histogram), 0
        for exponent, count in self.histogram:
            seen += count
            if seen / whole >= q:  # q times the whole may round up: 7 / 25 * 25 is more than 7
                return exponent
        return None

    def __add__(self, other: TensorHealth) -> TensorHealth:
        if not isinstance(other, TensorHealth):
            return NotImplemented
        if bool(self.numel) != bool(other.numel):
            return self if self.numel else other
        histogram = None
        if self.histogram is not None and other.histogram is not None:
            counts = Counter(dict(self.histogram)) + Counter(dict(other.histogram))
            histogram = tuple(sorted(counts.items()))
        return TensorHealth(
            self.dtype if self.dtype == other.dtype else MIXED,
            self.numel + other.numel,
            self.zeros + other.zeros,
            self.subnormals + other.subnormals,
            self.infs + other.infs,
            self.nans + other.nans,
            amax=max(self.amax, other.amax),
            amin=min(self.amin, other.amin),
            sumsq=self.sumsq + other.sumsq,
            histogram=histogram,
        )


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """A tensor without a health record, and why: ``reason`` completes the sentence "not measured, because ..."."""

    reason: str

    def read(self) -> Unmeasured:
        """Return itself, so that it can be read like ``PendingHealth``."""
        return self

    def __str__(self) -> str:
        return f"not measured, because {self.reason}"
