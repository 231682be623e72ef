"""The loss scales that keep gradients inside float16, and the steps of a scaler.

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

from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of
from ampcheck.core.run import Where

POOL = "all tensors together"
"""The name under which the pool of all tensors binds the lower end of a window."""

FEW = 8
"""A tensor with fewer nonzero elements than this counts in the pool only: one element decides too much of its share."""

LOWEST, _HIGHEST = -1074, 1023
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
        """True if no scale keeps all tensors."""
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
        """Return whether a scale, any number, is inside; the bounds at the ends are also true between them."""
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
    needed, needed_by = LOWEST, POOL
    candidates = [(POOL, sum(histograms.values(), GradientHistogram()))]
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
    """Return whether gradients can be multiplied by a loss scale and divided by it again: positive, with a finite
    inverse.

    GradScaler multiplies by the inverse in float32, which is infinite for a scale below 2^-128.
    """
    return 0 < scale < math.inf and 1 / scale <= format_of("float32").max


def _needed(histogram: GradientHistogram, share: float) -> int:
    """log2 of the smallest scale at which at most `share` is lost: the first bin beyond the share is kept."""
    lost, whole = 0, histogram.nonzero
    for b in sorted(histogram.counts):
        lost += histogram.counts[b]
        if lost / whole > share:
            return max(_FLUSH - b + 1, LOWEST)
    return LOWEST


COLLAPSE = 8
"""Steps skipped one after the other, with nothing but smaller scales between them, that are no back-off any more."""

_OFTEN = 0.1
"""A share of skipped steps that is no accident of single batches any more."""


@dataclass(frozen=True, slots=True)
class ScalerStep:
    """Activity of a scaler between two updates, or in one step of the loop where it was not updated.

    step: the number of the loop's step. scale: the one in use. taken, skipped: calls of `scaler.step` that did and did
    not step their optimizer. new_scale: the one after `update`; None without one. nonfinite: parameters whose gradient
    was infinite or NaN.
    """

    step: int
    scale: float
    taken: int = 0
    skipped: int = 0
    new_scale: float | None = None
    nonfinite: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScalerStats:
    """The steps of one scaler. enabled: False where it passes everything through."""

    enabled: bool
    steps: tuple[ScalerStep, ...]

    @property
    def skipped_by(self) -> dict[str, int]:
        """Number of skipped steps in which each parameter's gradient was not finite."""
        return dict(Counter(name for step in self.steps for name in step.nonfinite))

    @property
    def trajectory(self) -> tuple[tuple[int, float, bool], ...]:
        """(step, scale, whether no optimizer was stepped) of each scaler step."""
        return tuple((step.step, step.scale, not step.taken) for step in self.steps if step.taken or step.skipped)

    @property
    def scale_in_use(self) -> float | None:
        """The scale of the last step that was taken; None where none was."""
        return next((step.scale for step in reversed(self.steps) if step.taken), None)

    @property
    def last_scale(self) -> float | None:
        """The scale that the next step would have."""
        if not self.steps:
            return None
        last = self.steps[-1]
        return last.scale if last.new_scale is None else last.new_scale


@dataclass(frozen=True, slots=True)
class LossScaleStats(ScalerStats):
    """The steps of a scaler, and what is known of its loss scale; without an enabled one the scale is 1.

    format: the 16-bit format in which gradients flow, `""` where none does. window: of float16 gradients, predicted
    from the histograms of the unscaled ones; None where none was measured. first_op: the op in which a value first
    became infinite or NaN. verified: (scale, worst share lost, whether a gradient was not finite) of real backward
    passes. damage: what the scale in use does to the gradients of all parameters together, where another one would save
    them. real_lost: the share that each parameter lost in the backward pass that `gradient-underflow` judges, at
    `real_scale`. counted: in which steps gradients were counted as they are, "" where float64 says what they would be.
    What vanished already is not in their window then, nor what overflows in the steps that were skipped.
    """

    subject: str
    format: str
    window: ScaleWindow | None
    first_op: Where | None = None
    verified: tuple[tuple[float, float, bool], ...] = ()
    damage: str = ""
    real_scale: float | None = None
    real_lost: Mapping[str, float] = field(default_factory=dict)
    counted: str = ""

    @property
    def scale(self) -> float | None:
        """The scale to judge: the one in use, 1 without a scaler."""
        return self.scale_in_use if self.enabled else 1.0

    @property
    def measured_window(self) -> ScaleWindow | None:
        """The window, where a gradient with a nonzero element was measured."""
        return self.window if self.window is not None and self.window.nonzero else None

    @property
    def unusable(self) -> tuple[int, float] | None:
        """(step, scale) of the first scale that is not positive and finite; of the next step where that is the last."""
        steps = [(step, scale) for step, scale, _ in self.trajectory]
        if steps and self.last_scale is not None:
            steps.append((steps[-1][0] + 1, self.last_scale))
        return next(((step, scale) for step, scale in steps if not is_usable(scale)), None)

    @property
    def updated(self) -> bool:
        """True if the scaler was updated."""
        return any(step.new_scale is not None for step in self.steps)

    @property
    def often_skipped(self) -> float | None:
        """The share of steps that was skipped after the first that was taken; None where the scale grew before them."""
        skips = [skip for _, _, skip in self.trajectory]
        later = skips[skips.index(False) + 1 :] if False in skips else []
        grown = sum(step.new_scale is not None and step.new_scale > step.scale for step in self.steps)
        share = sum(later) / len(later) if later else 0.0
        return share if sum(later) - grown > COLLAPSE and share > _OFTEN else None

    @property
    def hopeless(self) -> bool:
        """True if no step was taken or no scaler is in use, and every real backward pass overflows, at every scale."""
        idle = not self.enabled or self.scale_in_use is None
        return idle and bool(self.verified) and all(overflows for _, _, overflows in self.verified)

    def measured(self, scale: float | None) -> tuple[float, bool] | None:
        """(worst share lost, whether a gradient was not finite) of the real backward pass at a scale."""
        return next(((lost, overflows) for at, lost, overflows in self.verified if at == scale), None)


def power(scale: float) -> str:
    """A scale as text: a power of two with its exponent, `2^16`; small ones, and all others, in digits."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 and not 1 <= scale <= 1024 else f"{scale:.6g}"
