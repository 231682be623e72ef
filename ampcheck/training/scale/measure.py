"""The steps of each GradScaler, and the window of loss scales: predicted in float64, verified by real backward passes.

The prediction needs the gradients of one step only; the step runs again at the ends of the predicted window.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ampcheck.core.limits import Limits
from ampcheck.core.run import Where
from ampcheck.training.distributed.ranks import gather
from ampcheck.training.gradients.watch import GradientStats
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.loss_scale_window import ScaleWindow, largest_scale, scale_window
from ampcheck.training.protocol.events import Act, Event
from ampcheck.training.scale.stats import LossScaleStats, ScalerStats, ScalerStep, loss_scale_stats


def measure_scalers(events: Iterable[Event]) -> dict[str, ScalerStats]:
    """The steps of every scaler among recorded events, by its path in the loop.

    A scaler without a `scaler.step` has no steps. A disabled scaler has scale 1.
    """
    by_scaler: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.act in (Act.SCALE, Act.UNSCALE, Act.SCALER_STEP, Act.UPDATE):
            by_scaler[event.who].append(event)
    return {
        who: ScalerStats(who, any(event.enabled for event in own), tuple(_scaler_steps(own)))
        for who, own in by_scaler.items()
    }


def _scaler_steps(events: Sequence[Event]) -> Iterator[ScalerStep]:
    calls: list[Event] = []
    for event in events:
        if calls and calls[-1].step != event.step:
            yield from _scaler_step(calls)
            calls = []
        if event.act in (Act.SCALER_STEP, Act.UPDATE):
            calls.append(event)
        if event.act is Act.UPDATE:
            yield from _scaler_step(calls)
            calls = []
    yield from _scaler_step(calls)


def _scaler_step(calls: Sequence[Event]) -> Iterator[ScalerStep]:
    """The step that calls of `scaler.step`, and of `scaler.update` at their end, make up."""
    scale = next((call.scale for call in calls if call.scale is not None), None)
    if calls and scale is None and not calls[0].enabled:
        scale = 1.0
    if scale is None:
        return
    taken = sum(call.act is Act.SCALER_STEP and not call.skipped for call in calls)
    skipped = [call for call in calls if call.act is Act.SCALER_STEP and call.skipped]
    names = dict.fromkeys(name for call in skipped for name in call.nonfinite)
    yield ScalerStep(calls[0].step, scale, taken, len(skipped), calls[-1].new_scale, tuple(names))


def in_succession(scalers: Mapping[str, ScalerStats]) -> dict[str, ScalerStats]:
    """Scalers at one path (`scaler`, `scaler#2`, ...) of which each begins after the one before has ended, as one."""
    merged: dict[str, ScalerStats] = {}
    heads: dict[str, str] = {}
    for who, scaler in scalers.items():
        head = heads.setdefault(who.partition("#")[0], who)
        before = merged.get(head)
        if before is None or not (before.steps and scaler.steps and before.steps[-1].step < scaler.steps[0].step):
            merged[who] = scaler
        else:
            merged[head] = ScalerStats(head, before.enabled or scaler.enabled, before.steps + scaler.steps)
    return merged


def measure_loss_scale(
    loop: TrainingLoop,
    gradients: GradientStats,
    events: Sequence[Event],
    limits: Limits,
    *,
    first_op: Where | None = None,
) -> list[LossScaleStats]:
    """The window of the step in `gradients`, at `limits.underflow`, and the steps of each scaler.

    The exact gradients say what vanishes at the lower end, and the largest value of their backward pass what overflows
    at the upper one. The steps that ran bear witness at their own scales.
    """
    scalers = tuple(scaler for scaler in in_succession(measure_scalers(events)).values() if scaler.enabled)
    window: ScaleWindow | None = None
    if gradients.histograms and gradients.format == "float16":
        weights = [name for name in gradients.histograms if name not in gradients.outputs]
        window = scale_window(gradients.histograms, share=limits.underflow, dtype="float16", binding=weights)
        allowed = largest_scale(gradients.largest, "float16")
        if allowed < window.allowed:
            window = replace(window, allowed=allowed, allowed_by=gradients.largest_at)
    lost = {loss.name: loss.lost for loss in gradients.gradients if loss.kind == "parameter" and loss.known}
    attempts = gradients.attempts
    if scalers and first_op is not None and first_op.phase == "backward":
        attempts = tuple(attempt for attempt in attempts if not attempt[2])  # a smaller scale mends what overflowed
    stats = (
        loss_scale_stats(loop.name, window, scaler, format=gradients.format, first_op=first_op, verified=attempts)
        for scaler in (scalers or (None,))
    )
    return [replace(path, real_scale=gradients.scale, real_lost=lost) for path in stats]


def first_skipped(events: Sequence[Event]) -> int | None:
    """The first step that a scaler skipped, of all ranks together; None without one."""
    here = next((event.step for event in events if event.act is Act.SCALER_STEP and event.skipped), None)
    return min((step for step in gather(here) if step is not None), default=None)
