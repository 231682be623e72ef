"""Whether a loss scale collapses: every step is skipped, it falls below 1, or it is no usable number any more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.training.gradients.nonfinite import mend_nonfinite
from ampcheck.training.scale.stats import LossScaleStats
from ampcheck.training.scale.trajectory import COLLAPSE, has_fallen, is_settled, skipped_last
from ampcheck.training.scale.words import known_window, nonfinite, power, reach, skips

CHECK = "loss-scale"


def check_collapse(stats: LossScaleStats) -> list[Finding]:
    """Whether the last steps were all skipped where they need not be, or the scale fell below 1; empty if neither."""
    if not stats.enabled or not stats.trajectory:
        return []
    window = known_window(stats)
    finite = [scale for scale, _, over in stats.verified if not over]
    ends = [end for end in (window.high if window else None, max(finite, default=None)) if end is not None]
    ceiling = None if stats.hopeless else min(ends, default=None)
    skipped = skipped_last(stats.trajectory, ceiling)
    first, last = stats.trajectory[0][1], stats.last_scale
    stands = False
    if skipped >= COLLAPSE:
        where = f" at scales up to {power(ceiling)}, where none should overflow" if ceiling else ""
        text = f"the last {skipped_last(stats.trajectory)} of {len(stats.trajectory)} steps were all skipped{where}"
        observed, limit, unit = float(skipped), float(COLLAPSE), "skipped steps in a row"
    elif (stood := _skipped_at_one_scale(stats.trajectory)) >= COLLAPSE:
        text = f"the last {stood} of {len(stats.trajectory)} steps were all skipped, and the scale never fell"
        observed, limit, unit = float(stood), float(COLLAPSE), "skipped steps in a row"
        stands = True
    elif last is not None and has_fallen(first, last):
        text = f"it fell below 1, from {power(first)} to {power(last)}"
        observed, limit, unit = last, 1.0, "loss scale"
    else:
        return []
    works = is_settled(window, *stats.trajectory[-1][1:])
    verdict = Verdict.WARN if works and skipped < COLLAPSE else Verdict.FAIL
    message = f"the loss scale must settle where gradients are finite; {text}{skips(stats)}"
    if window:
        message += f"; {reach(stats, window)}"
    if window and window.nonfinite:
        message += f"; {nonfinite(window)}"
    hint = (
        "keep one GradScaler for the whole run and call scaler.update() in each step, with a backoff_factor below 1"
        if stands
        else _too_large(first, stats.serves)
        if skipped < COLLAPSE and stats.serves is not None and stats.serves < 1
        else mend_every_scale(stats)
    )
    step = next((step for step, _, bad in stats.trajectory if bad), None)
    place = place_of(stats, step)
    return [Finding(CHECK, verdict, stats.subject, message, place, observed, limit, unit, hint)]


def _too_large(first: float, serves: float) -> str:
    """The hint where nothing overflows at a scale below 1: by how much to divide the loss for the first scale to do."""
    factor = math.ldexp(1.0, math.frexp(first)[1] - math.frexp(serves)[1] + (math.frexp(first)[0] > 0.5))
    return (
        f"the loss is too large: its gradients overflow above a loss scale of {power(serves)}; average the loss "
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


def place_of(stats: LossScaleStats, step: int | None = None) -> Where:
    """The op in which the first skipped step overflows, with its own phase and line."""
    first = stats.first_op or Where("backward")
    return replace(first, phase=first.phase or "backward", step=step)


def check_unusable(stats: LossScaleStats, step: int, scale: float) -> Finding:
    """A scale of 0, infinity or NaN turns every gradient into 0, infinity or NaN, and GradScaler never leaves it."""
    before = [(number, skipped) for number, _, skipped in stats.trajectory if number < step]
    message = f"the loss scale must be a positive number whose inverse is finite in float32; it is {scale:.6g}"
    place = Where("backward", step=step)
    if not before:
        message += f" from the first step on, in all of {len(stats.trajectory)} steps"
        hint = (
            "give GradScaler a positive finite init_scale, and check the 'scale' of a checkpoint before "
            "scaler.load_state_dict(): one that was saved after a collapse keeps every later run from learning"
        )
    elif scale < 1:
        place, skipped = place_of(stats, step), sum(skipped for _, skipped in before)
        message += (
            f" from step {step} on, after {power(stats.trajectory[0][1])} in step {stats.trajectory[0][0]}"
            f"{f' and {skipped} skipped step' + 's' * (skipped > 1) if skipped else ''}{skips(stats)}"
        )
        hint = (
            "gradients that are infinite or NaN at any scale halve it in every step: mend what makes them (see "
            "overflow and nonfinite-gradient, and keep that op in float32), and stop a run whose scale falls below 1"
        )
    else:
        message += f" from step {step} on, after {power(stats.trajectory[0][1])} in step {stats.trajectory[0][0]}"
        hint = "use a growth_factor near 2, and give scaler.update(new_scale) a finite number only"
    return Finding(CHECK, Verdict.FAIL, stats.subject, message, place, scale, None, "loss scale", hint)


def _skipped_at_one_scale(trajectory: Sequence[tuple[int, float, bool]]) -> int:
    """How many steps at the end were skipped, at a scale that none of them made smaller."""
    skipped = list(takewhile(lambda one: one[2], reversed(trajectory)))
    return len(skipped) if skipped and skipped[0][1] >= skipped[-1][1] else 0
