"""What is known of one loss scale, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ampcheck.core.run import Where
from ampcheck.training.scale.trajectory import ScalerStats
from ampcheck.training.window import ScaleWindow, is_usable


@dataclass(frozen=True, slots=True)
class LossScaleStats:
    """What is known of one loss scale.

    format: the 16-bit format in which gradients flow, `""` where none does. window: predicted from the histograms of
    the unscaled gradients; None where none was measured. enabled: whether there is a scaler that scales.
    scale_in_use: the scale of the last step that was taken; None where none was. last_scale: the one that the next step
    would have. trajectory: (step, scale, whether no optimizer was stepped) of each scaler step. skipped_by: how often
    each parameter was not finite in a skipped step. first_op: the op in which a value first became infinite or NaN.
    verified: (scale, worst share lost, whether a gradient was not finite) of real backward passes. damage: what the
    scale in use does to the gradients of all parameters together, where another one would save them. real_lost: the
    share that each parameter lost in the backward pass that `gradient-underflow` judges, at `real_scale`.
    """

    subject: str
    format: str
    window: ScaleWindow | None
    scale_in_use: float | None
    enabled: bool
    last_scale: float | None = None
    trajectory: tuple[tuple[int, float, bool], ...] = ()
    skipped_by: Mapping[str, int] = field(default_factory=dict)
    first_op: Where | None = None
    verified: tuple[tuple[float, float, bool], ...] = ()
    scaler: str = ""
    damage: str = ""
    real_scale: float | None = None
    real_lost: Mapping[str, float] = field(default_factory=dict)

    @property
    def scale(self) -> float | None:
        """The scale to judge: the one in use, 1 without a scaler."""
        return self.scale_in_use if self.enabled else 1.0

    @property
    def unusable(self) -> tuple[int, float] | None:
        """(step, scale) of the first scale that is not positive and finite; of the next step where that is the last."""
        steps = [(step, scale) for step, scale, _ in self.trajectory]
        if steps and self.last_scale is not None:
            steps.append((steps[-1][0] + 1, self.last_scale))
        return next(((step, scale) for step, scale in steps if not is_usable(scale)), None)

    @property
    def hopeless(self) -> bool:
        """Whether no step was taken or no scaler is in use, and every real backward pass overflows, at every scale."""
        idle = not self.enabled or self.scale_in_use is None
        return idle and bool(self.verified) and all(over for _, _, over in self.verified)

    @property
    def serves(self) -> float | None:
        """The largest scale at which nothing overflows: of real backward passes where they ran, else predicted."""
        if self.verified:
            return max((scale for scale, _, over in self.verified if not over), default=None)
        window = self.window
        return window.high if window is not None and window.nonzero and not window.nonfinite else None

    def measured(self, scale: float | None) -> tuple[float, bool] | None:
        """(worst share lost, whether a gradient was not finite) of the real backward pass at a scale."""
        return next(((lost, over) for one, lost, over in self.verified if one == scale), None)


def loss_scale_stats(
    subject: str,
    window: ScaleWindow | None,
    scaler: ScalerStats | None,
    *,
    format: str,
    first_op: Where | None = None,
    verified: Sequence[tuple[float, float, bool]] = (),
) -> LossScaleStats:
    """What a window and the path of a scaler tell together; without a scaler the loss scale is 1."""
    known = (subject, format, window)
    told = tuple(sorted(verified))
    if scaler is None or not scaler.enabled:
        return LossScaleStats(*known, 1.0, False, first_op=first_op, verified=told)
    return LossScaleStats(
        *known,
        scaler.scale_in_use,
        True,
        scaler.last_scale,
        scaler.trajectory,
        scaler.skipped_by,
        first_op,
        told,
        scaler.scaler,
    )
