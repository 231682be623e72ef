"""Gradients beside float64: what each loses, and what they lose together."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Where
from ampcheck.core.text import at_scale
from ampcheck.records.scales import FEW, GradientHistogram


@dataclass(slots=True)
class GradientLoss:
    """One gradient compared with exact, all its passes in the step together; or of all counted steps, with what shows
    that zeros were flushed in `marks`, without any of which none counts as such. Counts are of elements.

    dtype: in which the gradient came; made_in: the same, or float16 where a float32 gradient of autocast's holds
    nothing but values of float16. known: nonzero in exact, and determined by the data; of these zero: zero here, and
    subnormal: subnormal here in the format it was made in. reverse: zero in exact and not here. nonfinite: infinite or
    NaN here. Sums of squares of the known elements: lost_squares of those that became zero, squares of all, in exact,
    off_squares of what they differ by, and flushed_squares of that in gradients that a flush on the way has reached.
    """

    name: str
    dtype: str = ""
    made_in: str = ""
    numel: int = 0
    known: int = 0
    zero: int = 0
    reverse: int = 0
    subnormal: int = 0
    nonfinite: int = 0
    lost_squares: float = 0.0
    squares: float = 0.0
    off_squares: float = 0.0
    flushed_squares: float = 0.0
    marks: str = ""
    where: Where = field(default_factory=lambda: Where("backward"))

    @property
    def norm(self) -> float:
        """Which part of the Euclidean norm of the known elements became zero."""
        return (self.lost_squares / self.squares) ** 0.5 if self.squares > 0 else 0.0

    @property
    def lost(self) -> float:
        """The share of the known elements that became zero, noise taken off."""
        return max(0, self.zero - self.reverse) / self.known if self.known else 0.0

    @property
    def share(self) -> float:
        """The share that is judged: of the elements, and of the norm where it is less and there are few elements.

        Of few, one that is nearly zero may become zero by cancellation alone.
        """
        return self.lost if self.known >= FEW or self.marks else min(self.lost, self.norm)

    @property
    def faint(self) -> float:
        """The share of the known elements that became zero or subnormal."""
        return min(1.0, max(0, self.zero + self.subnormal - self.reverse) / self.known) if self.known else 0.0


@dataclass(frozen=True, slots=True)
class Underflow:
    """Loss of digits in the gradients of all parameters at the loss scale in use that another, `scale`, avoids.

    error: their relative error in the Euclidean norm; cured: that without what the values lost that became zero or
    subnormal. A power of two as loss scale changes nothing else.
    """

    error: float
    scale: float
    cured: float


@dataclass(frozen=True, slots=True)
class GradientStats:
    """The gradients of one step beside exact.

    step: which one. format: the 16-bit format that gradients were made in, "" where none was. scale: the loss scale, 1
    without a scaler. gradients: of parameters, the worst first. histograms: of exact, unscaled, those that were made in
    float16, by name. largest, largest_at: the largest magnitude of float16 in backward, unscaled, and where. underflow:
    what another loss scale would save. attempts: (scale, worst share lost, whether anything overflowed) of each step up
    to this one. later: those of the last two steps after it in which every optimizer was stepped. skipped: why the loop
    leaves nothing to judge; hint: what to change about that. counted: in which steps gradients were counted that were
    not compared with exact, "" where they were; `step` is None then.
    """

    subject: str
    step: int | None
    format: str = ""
    scale: float = 1.0
    gradients: tuple[GradientLoss, ...] = ()
    histograms: dict[str, GradientHistogram] = field(default_factory=dict)
    largest: float = 0.0
    largest_at: str = ""
    underflow: Underflow | None = None
    attempts: tuple[tuple[float, float, bool], ...] = ()
    coverage: Coverage = field(default_factory=Coverage)
    later: tuple[GradientStats, ...] = ()
    skipped: str = ""
    hint: str = ""
    counted: str = ""

    @property
    def lost(self) -> float | None:
        """The largest share that a parameter lost; None where nothing was measured."""
        return max((loss.share for loss in self.gradients), default=None)

    def lossy(self, limits: Limits) -> set[str]:
        """The parameters that lose more than `limits.underflow` of their elements."""
        return {loss.name for loss in self.gradients if loss.known and loss.share > limits.underflow}

    def damage_text(self, limits: Limits) -> str:
        """Return what the underflow did to the gradients of all parameters together, to append to a message.

        Empty where they lose no more than `limits.underflow` of their norm.
        """
        lost = self.underflow
        if lost is None or lost.error <= limits.underflow:
            return ""
        return (
            f"; the gradients of all parameters together are off by {lost.error:.1%} of their norm "
            f"{at_scale(self.scale)}, and by {lost.cured:.2%} {at_scale(lost.scale)}: the rest vanished"
        )
