"""Whether a loss scale settles where steps are made, and how findings word its steps."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import takewhile

from ampcheck.catalog.training import LOSS_SCALE
from ampcheck.checks.range import mend_nonfinite
from ampcheck.core.check import Evidence
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.text import counted, percent
from ampcheck.training.loss_scale_window import ScaleWindow
from ampcheck.training.scale.stats import COLLAPSE, LossScaleStats, power

_LISTED = 5


def collapse(stats: LossScaleStats) -> list[Finding]:
    """Whether the last steps were all skipped though gradients should be finite, or the scale fell below 1."""
    if not stats.enabled or not stats.trajectory:
        return []
    window = stats.measured_window
    predicted = window.high if window else None
    real = max((scale for scale, _, overflows in stats.verified if not overflows), default=None)
    ends = [end for end in (predicted, real) if end is not None]
    ceiling = None if stats.hopeless or stats.counted else min(ends, default=None)
    searching = bool(stats.counted) and stats.scale is None  # nobody knows yet which scale will serve
    trailing = [scale for _, scale, _ in takewhile(lambda step: step[2], reversed(stats.trajectory))]
    skipped, all_skipped = sum(ceiling is None or scale <= ceiling for scale in trailing), len(trailing)
    constant = all_skipped >= COLLAPSE and trailing[0] >= trailing[-1]
    first, last, steps = stats.trajectory[0][1], stats.last_scale, len(stats.trajectory)
    observed, limit, unit = float(skipped), float(COLLAPSE), "skipped steps in a row"
    hint = mend_every_scale(stats)
    if skipped >= COLLAPSE and not searching:
        up_to = f" at scales up to {power(ceiling)}, where none should overflow" if ceiling else ""
        text = f"the last {all_skipped} of {steps} steps were all skipped{up_to}"
    elif constant:
        text = f"the last {all_skipped} of {steps} steps were all skipped, and the scale never fell"
        observed = float(all_skipped)
        hint = (
            "keep one GradScaler for the whole run and call scaler.update() in each step, with a backoff_factor below 1"
        )
    elif last is not None and last < 1 <= first:  # one that was set lower was chosen, for sums of losses say
        text = f"it fell below 1, from {power(first)} to {power(last)}"
        observed, limit, unit = last, 1.0, "loss scale"
        finite = real if stats.verified else None if window and window.nonfinite else predicted
        if finite is not None and finite < 1:
            hint = _too_large(first, finite)
    else:
        return []
    last_step = next(step for step in reversed(stats.steps) if step.taken or step.skipped)
    # A scale that fell so far is where it belongs, if steps are taken there.
    settled = skipped < COLLAPSE and not last_step.skipped and window is not None and window.contains(last_step.scale)
    message = f"the loss scale must settle where gradients are finite; {text}{skips_text(stats)}"
    if window:
        message += f"; {finite_scales_text(stats, window)}"
    if window and window.nonfinite:
        message += f"; {nonfinite_text(window)}"
    where = first_op(stats, next((step for step, _, skip in stats.trajectory if skip), None))
    verdict = Verdict.WARN if settled else Verdict.FAIL
    shown = Evidence(where=where, observed=observed, limit=limit, unit=unit, hint=hint)
    return [LOSS_SCALE.finding(verdict, stats.subject, message, **shown)]


def _too_large(first: float, finite: float) -> str:
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
    """How many steps were skipped, whose gradients were not finite, and in which op that began; empty without one."""
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
