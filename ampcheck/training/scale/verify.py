"""The loss-scale window of a loop: predicted from the gradients of one step in float64, verified by real runs of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ampcheck.core.limits import Limits
from ampcheck.core.run import Where
from ampcheck.training.distributed.ranks import gather
from ampcheck.training.gradients.underflow import GradientLoss, GradientShadow, GradientStats
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.protocol.events import Act, Event
from ampcheck.training.scale.stats import LossScaleStats, loss_scale_stats
from ampcheck.training.scale.trajectory import in_succession, measure_scalers
from ampcheck.training.window import FEW, ScaleWindow, scale_window

MOVES = 8
"""How many powers of two an end of the window is moved, where a real run says something else than the histograms."""


def measure_loss_scale(
    loop: TrainingLoop,
    gradients: GradientStats,
    shadow: GradientShadow | None,
    events: Sequence[Event],
    limits: Limits,
    *,
    first_op: Where | None = None,
) -> list[LossScaleStats]:
    """The window of the step that `gradients` tells of, at `limits.underflow`, and the path of each scaler.

    The ends are verified: the step runs again at each, and one power of two beyond; where it loses more, or an op
    inside overflows, the end moves.
    """
    scalers = tuple(one for one in in_succession(measure_scalers(events)).values() if one.enabled)
    window: ScaleWindow | None = None
    verified: dict[float, tuple[float, bool, str]] = {}
    if gradients.histograms and gradients.format == "float16":
        weights = [name for name in gradients.histograms if name not in gradients.outputs]
        window = scale_window(gradients.histograms, share=limits.underflow, dtype="float16", binding=weights)
        if shadow is not None and window.nonzero:
            window = _verified(window, shadow, gradients.scale, verified)
    told = [(scale, lost, over) for scale, (lost, over, _) in verified.items()]
    real = {one.name: one.lost for one in gradients.gradients if one.kind == "parameter" and one.known}
    stats = (
        loss_scale_stats(loop.name, window, scaler, format=gradients.format, first_op=first_op, verified=told)
        for scaler in (scalers or (None,))
    )
    return [replace(one, real_scale=gradients.scale, real_lost=real) for one in stats]


def _verified(
    window: ScaleWindow, shadow: GradientShadow, scale: float, verified: dict[float, tuple[float, bool, str]]
) -> ScaleWindow:
    def run(exponent: int) -> tuple[float, bool, str]:
        at = math.ldexp(1.0, exponent)
        if at not in verified:
            verified[at] = _told(shadow.beside(at / scale)[0])
        return verified[at]

    needed, allowed = window.needed, window.allowed
    if window.empty:
        run(needed)
        run(allowed)
        return window
    last = needed + MOVES
    while run(needed)[0] > window.share and needed < min(last, allowed):
        needed += 1
    last = needed - MOVES
    while needed > last and run(needed - 1)[0] <= window.share:
        needed -= 1
    by = window.allowed_by
    last = allowed - MOVES
    while allowed > max(last, needed - 1) and run(allowed)[1]:
        by, allowed = run(allowed)[2], allowed - 1
    if needed < allowed == last and run(allowed)[1] and not run(needed)[1]:  # an op inside overflows much earlier
        serves = needed
        while allowed - serves > 1:
            middle = (serves + allowed) // 2
            serves, allowed = (serves, middle) if run(middle)[1] else (middle, allowed)
        by, allowed = run(allowed)[2], serves
    last = allowed + MOVES
    while needed <= allowed < last and not run(allowed + 1)[1]:
        allowed += 1
    return replace(window, needed=needed, allowed=allowed, allowed_by=by)


def _told(losses: dict[tuple[str, str], GradientLoss]) -> tuple[float, bool, str]:
    """The worst share that a parameter lost, whether anything overflowed, and what."""
    weights = [one for one in losses.values() if one.kind == "parameter" and one.known]
    known = sum(one.known for one in weights)
    pooled = sum(max(0, one.zero - one.reverse) for one in weights) / known if known else 0.0
    worst = max([pooled, *(one.lost for one in weights if one.known >= FEW)])
    over = [one.name for one in losses.values() if one.nonfinite]
    return worst, bool(over), over[0] if over else ""


def first_skipped(events: Sequence[Event]) -> int | None:
    """The first step that a scaler skipped, of all ranks together; None without one."""
    here = next((event.step for event in events if event.act is Act.SCALER_STEP and event.skipped), None)
    return min((step for step in gather(here) if step is not None), default=None)
