"""The loss-scale window: which loss scales keep the gradients of a step inside float16.

A backward pass multiplies every gradient by the loss scale before it is rounded to float16. Rounding is monotone, so
the elements that a power of two as scale loses follow exactly from how many elements each binade contains, without
another backward pass. The prediction covers the roundings of the measured gradients; an op that overflows inside, or a
gradient that vanished on the way, shows in real runs only (`LossScaleStats.verified`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of

POOL = "all tensors together"
"""The name under which the pool of all tensors binds the lower end of a window."""

FEW = 8
"""A tensor with fewer nonzero elements than this counts in the pool only: one element decides too much of its share."""

_LOWEST, _HIGHEST = -1074, 1023
"""The powers of two of float64, which bound all scales. The bins of magnitudes go one further, to 1024."""

_FLUSH = math.frexp(format_of("float16").flushes_at)[1] - 1
"""log2 of the largest magnitude that rounds to zero."""

_OVERFLOW = format_of("float16").overflows_at


@dataclass(frozen=True)
class GradientHistogram:
    """The magnitudes of the elements of one gradient, unscaled.

    counts: elements by bin b, those with ``2**(b - 1) < |g| <= 2**b``, nonzero and finite ones only. The upper end is
    inside because half of the smallest subnormal rounds to zero itself (ties to even). largest: the largest finite
    magnitude, exactly. nonfinite: how many elements are infinite or NaN.
    """

    counts: Mapping[int, int] = field(default_factory=dict)
    largest: float = 0.0
    nonfinite: int = 0

    def __add__(self, other: GradientHistogram) -> GradientHistogram:
        """The histogram of both, exactly: of two tensors, steps or ranks."""
        counts = dict(sorted((Counter(self.counts) + Counter(other.counts)).items()))
        return GradientHistogram(counts, max(self.largest, other.largest), self.nonfinite + other.nonfinite)

    @cached_property
    def nonzero(self) -> int:
        """Elements that are finite and not zero."""
        return sum(self.counts.values())

    def lost(self, scale: int) -> float:
        """The share of the nonzero elements that rounds to zero at a scale of ``2**scale``."""
        lost = sum([count for b, count in self.counts.items() if b + scale <= _FLUSH])
        return lost / self.nonzero if lost else 0.0


def histogram_of(tensor: torch.Tensor) -> GradientHistogram:
    """The exact histogram of an unscaled gradient, a strided real tensor of any shape and floating dtype.

    Rounding noise must be left out (a key's bias before a softmax has no other gradient): no scale keeps it.
    """
    magnitudes = tensor.detach().reshape(-1).double().abs()
    finite = magnitudes[magnitudes < math.inf]  # false for NaN as well
    nonzero = finite[finite > 0]
    mantissa, exponent = torch.frexp(nonzero)
    counts = torch.bincount(exponent.long() - (mantissa == 0.5).long() - _LOWEST).tolist()
    return GradientHistogram(
        {number + _LOWEST: count for number, count in enumerate(counts) if count},
        float(nonzero.amax()) if nonzero.numel() else 0.0,
        magnitudes.numel() - finite.numel(),
    )


@dataclass(frozen=True, slots=True)
class AtScale:
    """The effects of one loss scale.

    lost: the largest share of nonzero elements that rounds to zero, that of `tensor` (`POOL`: of all together). pooled:
    the share of all tensors together. overflows: the tensors whose largest element rounds to infinity.
    """

    lost: float
    tensor: str
    pooled: float
    overflows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScaleWindow:
    """The loss scales, as powers of two, at which no tensor loses more than `share` and none overflows.

    histograms: the unscaled gradients. needed: log2 of the smallest scale at which every share is at most `share`;
    allowed: log2 of the largest at which nothing overflows. needed_by, allowed_by: the tensors that bind these ends.
    The window is empty where needed > allowed. Real runs may move the ends (`dataclasses.replace`); `at` still follows
    the histograms.
    """

    share: float
    histograms: Mapping[str, GradientHistogram]
    needed: int
    allowed: int
    needed_by: str
    allowed_by: str

    @property
    def empty(self) -> bool:
        """Whether no scale keeps all tensors."""
        return self.needed > self.allowed

    @property
    def low(self) -> float | None:
        """Smallest scale of the window; None of an empty one."""
        return None if self.empty else math.ldexp(1.0, self.needed)

    @property
    def high(self) -> float | None:
        """Largest scale of the window that is a power of two; None of an empty one."""
        return None if self.empty else math.ldexp(1.0, self.allowed)

    @property
    def nonzero(self) -> int:
        """Finite, nonzero elements of all tensors; without any the window has no meaning."""
        return sum([histogram.nonzero for histogram in self.histograms.values()])

    @property
    def nonfinite(self) -> dict[str, int]:
        """Tensors with elements that are infinite or NaN at any scale, and how many."""
        return {name: histogram.nonfinite for name, histogram in self.histograms.items() if histogram.nonfinite}

    def contains(self, scale: float) -> bool:
        """Whether a scale, any number, is inside; the bounds at the ends are also true between them."""
        return self.needed <= self.allowed and math.ldexp(1.0, self.needed) <= scale <= math.ldexp(1.0, self.allowed)

    def at(self, scale: float, *, at_least: bool = False) -> AtScale:
        """The effects of a scale. Overflow is exact at any scale, and what is lost at a power of two; between two it is
        an upper bound, or a lower one (`at_least`). Raises `UsageError` unless scale > 0."""
        if not 0 < scale < math.inf:
            raise UsageError(f"a loss scale must be a positive number; found {scale!r}")
        mantissa, exponent = math.frexp(scale)
        exponent = exponent if at_least and mantissa > 0.5 else exponent - 1  # of a power of two on this side of it
        shares, over, lost, whole = dict[str, float](), list[str](), 0, 0
        for name, histogram in self.histograms.items():
            flushed, nonzero = 0, histogram.nonzero
            for b, count in histogram.counts.items():
                flushed += count if b + exponent <= _FLUSH else 0
            lost, whole = lost + flushed, whole + nonzero
            if nonzero >= FEW:
                shares[name] = flushed / nonzero
            if histogram.largest * scale >= _OVERFLOW:
                over.append(name)
        pooled = lost / whole if lost else 0.0
        tensor = max(shares, key=shares.__getitem__, default=POOL)
        worst = shares.get(tensor, 0.0)
        if pooled > worst or not worst:
            worst, tensor = pooled, POOL
        return AtScale(worst, tensor, pooled, tuple(over))


def scale_window(histograms: Mapping[str, GradientHistogram], *, share: float) -> ScaleWindow:
    """The window of loss scales for gradients that are rounded to float16 once they are scaled.

    histograms: unscaled gradients of parameters by name; those of activations do not belong here: those of a softmax
    hold many elements too small to matter, while Adam takes each element of a parameter's by its own size. share: the
    part of the nonzero elements that may round to zero, of every tensor with `FEW` of them or more, and of all tensors
    together.

    Without a nonzero element the window is as wide as float64.
    """
    needed, needed_by = _LOWEST, POOL
    candidates = [(POOL, _pool(histograms))]
    candidates += [(name, histogram) for name, histogram in histograms.items() if histogram.nonzero >= FEW]
    for name, histogram in candidates:
        exponent = _needed(histogram, share)
        if exponent > needed or (exponent == needed and needed_by == POOL):
            needed, needed_by = exponent, name
    allowed, allowed_by = _HIGHEST, ""
    for name, histogram in histograms.items():
        exponent = largest_scale(histogram.largest)
        if exponent < allowed:
            allowed, allowed_by = exponent, name
    return ScaleWindow(share, histograms, needed, allowed, needed_by, allowed_by)


def largest_scale(magnitude: float) -> int:
    """log2 of the largest loss scale at which a value of this unscaled magnitude stays finite in float16."""
    if not magnitude:
        return _HIGHEST
    (mantissa, exponent), (end, last) = math.frexp(magnitude), math.frexp(_OVERFLOW)
    return min(last - exponent - (mantissa >= end), _HIGHEST)


def is_usable(scale: float) -> bool:
    """Whether gradients can be multiplied by a loss scale and divided by it again: positive, with a finite inverse.

    GradScaler multiplies by the inverse in float32, which is infinite for a scale below 2^-128.
    """
    return 0 < scale < math.inf and 1 / scale <= format_of("float32").max


def _pool(histograms: Mapping[str, GradientHistogram]) -> GradientHistogram:
    return sum(histograms.values(), GradientHistogram())


def _needed(histogram: GradientHistogram, share: float) -> int:
    """log2 of the smallest scale at which at most `share` is lost: the first bin beyond the share is kept."""
    lost, whole = 0, histogram.nonzero
    for b in sorted(histogram.counts):
        lost += histogram.counts[b]
        if lost / whole > share:
            return max(_FLUSH - b + 1, _LOWEST)
    return _LOWEST
