"""Words of the findings of `loss-scale` for the steps of a scaler and its window."""

from __future__ import annotations

import math
from dataclasses import replace

from ampcheck.checks.range import mend_nonfinite
from ampcheck.core.run import Where
from ampcheck.core.text import counted, percent
from ampcheck.records.scales import LossScaleStats, ScaleWindow, power

_LISTED = 5


def too_large(first: float, finite: float) -> str:
    """The hint where nothing overflows at a scale below 1: by how much to divide the loss, so that the first serves."""
    factor = math.ldexp(1.0, math.frexp(first)[1] - math.frexp(finite)[1] + (math.frexp(first)[0] > 0.5))
    return (
        f"the loss is too large: its gradients overflow above a loss scale of {power(finite)}; average the loss "
        f"instead of summing it, or divide it by {power(factor)}, so that the first scale, {power(first)}, serves"
    )


def mend_every_scale(stats: LossScaleStats) -> str:
    """The hint where no loss scale helps."""
    if stats.first_op is not None:
        return f"no loss scale mends this; {mend_nonfinite(stats.first_op)}"
    return (
        "what is not finite at any scale comes from the forward pass or from one op of the backward pass, not from the "
        "scale: see overflow and nonfinite-gradient, and keep that op in float32"
    )


def first_op(stats: LossScaleStats, step: int | None = None) -> Where:
    """The op in which the first skipped step overflows, with its own phase and line."""
    first = stats.first_op or Where("backward")
    return replace(first, phase=first.phase or "backward", step=step)


def span_text(window: ScaleWindow) -> str:
    """The scales of a window."""
    if window.low is None or window.high is None:
        return f"no loss scale loses at most {percent(window.share)} of a tensor and overflows nowhere"
    return (
        f"loss scales from {power(window.low)} to {power(window.high)} lose at most {percent(window.share)} of a "
        "tensor in float16 and overflow nowhere"
    )


def finite_scales_text(stats: LossScaleStats, window: ScaleWindow) -> str:
    """The scales of the window; those that were tried where real backward passes overflow at all of them."""
    if not stats.hopeless:
        return span_text(window)
    tried = [scale for scale, _, _ in stats.verified]
    return (
        f"real backward passes overflow at every scale that was tried, from {power(min(tried))} to "
        f"{power(max(tried))}, so that what overflows is not the scaled gradients"
    )


def skips_text(stats: LossScaleStats) -> str:
    """Return how many steps were skipped, whose gradients were not finite, and in which op that began; empty without
    one."""
    skipped = [step for step, _, skip in stats.trajectory if skip]
    if not skipped:
        return ""
    ordered = sorted(stats.skipped_by.items(), key=lambda item: (-item[1], item[0]))
    names = [f"{name} ({count}x)" for name, count in ordered[:_LISTED]]
    if len(ordered) > _LISTED:
        names.append(f"{len(ordered) - _LISTED} more")
    text = f"; the scaler skipped {len(skipped)} of {counted(len(stats.trajectory), 'steps')}, first step {skipped[0]}"
    text += f", not finite: {', '.join(names)}" if names else ""
    return text + (f", first in {stats.first_op}" if stats.first_op else "")


def nonfinite_text(window: ScaleWindow) -> str:
    """The elements that are not finite at any scale."""
    name, count = max(window.nonfinite.items(), key=lambda item: item[1])
    others = f" and {len(window.nonfinite) - 1} other tensors" if len(window.nonfinite) > 1 else ""
    return f"{count:,} elements of {name}{others} are infinite or NaN without any scale"
