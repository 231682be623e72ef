"""The steps of a GradScaler, and what is known of one loss scale: the record, its table and its charts.

The window of loss scales is predicted in float64; the steps that ran confirm it at the scales they used.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ampcheck.core.limits import Limits
from ampcheck.core.run import Band, Chart, Scalar, Series, Table, Where
from ampcheck.records.gradients import GradientStats
from ampcheck.records.protocol import Act, Event
from ampcheck.records.scales import (
    LossScaleStats,
    ScalerStats,
    ScalerStep,
    ScaleWindow,
    is_usable,
    largest_scale,
    power,
    scale_window,
)
from ampcheck.training.loop import TrainingLoop

_POINTS = 400

_BEYOND = 3
"""Powers of two that are shown beyond each end of the window."""

_ROWS = 48


def measure_scalers(events: Iterable[Event]) -> dict[str, ScalerStats]:
    """The steps of every scaler among recorded events, by its path in the loop.

    A scaler without a `scaler.step` has no steps. A disabled scaler has scale 1.
    """
    by_scaler: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.act in (Act.SCALE, Act.UNSCALE, Act.SCALER_STEP, Act.UPDATE):
            by_scaler[event.who].append(event)
    return {
        who: ScalerStats(any(event.enabled for event in own), tuple(_scaler_steps(own)))
        for who, own in by_scaler.items()
    }


def _scaler_steps(events: Sequence[Event]) -> Iterator[ScalerStep]:
    """The steps that calls of `scaler.step`, with the call of `scaler.update` that ends them, make up."""
    steps: dict[tuple[int, int], list[Event]] = defaultdict(list)
    updates = 0
    for event in events:
        if event.act in (Act.SCALER_STEP, Act.UPDATE):
            steps[event.step, updates].append(event)
        updates += event.act is Act.UPDATE
    for (step, _), calls in steps.items():
        scale = next((call.scale for call in calls if call.scale is not None), None if calls[0].enabled else 1.0)
        if scale is not None:
            taken = sum(call.act is Act.SCALER_STEP and not call.skipped for call in calls)
            skipped = [call for call in calls if call.act is Act.SCALER_STEP and call.skipped]
            names = dict.fromkeys(name for call in skipped for name in call.nonfinite)
            yield ScalerStep(step, scale, taken, len(skipped), calls[-1].new_scale, tuple(names))


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
            merged[head] = ScalerStats(before.enabled or scaler.enabled, before.steps + scaler.steps)
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
    at the upper one. The steps that ran confirm it at the scales they used.
    """
    scalers = tuple(scaler for scaler in in_succession(measure_scalers(events)).values() if scaler.enabled)
    window: ScaleWindow | None = None
    if gradients.histograms and gradients.format == "float16":
        window = scale_window(gradients.histograms, share=limits.underflow)
        allowed = largest_scale(gradients.largest)
        if allowed < window.allowed:
            window = replace(window, allowed=allowed, allowed_by=gradients.largest_at)
    attempts = gradients.attempts
    if scalers and first_op is not None and first_op.phase == "backward":
        attempts = tuple(attempt for attempt in attempts if not attempt[2])  # a smaller scale mends what overflowed
    lost = {loss.name: loss.lost for loss in gradients.gradients if loss.known}
    damage = gradients.damage_text(limits)
    return [
        LossScaleStats(
            *(scaler.enabled, scaler.steps, loop.name, gradients.format, window, first_op),
            verified=tuple(sorted(attempts)),
            damage=damage,
            real_scale=gradients.scale,
            real_lost=lost,
        )
        for scaler in scalers or (ScalerStats(False, ()),)
    ]


def loss_scale_table(stats: LossScaleStats) -> tuple[Table, ...]:
    """One row for each power of two around the window, and for what was verified; empty without a gradient."""
    window = stats.measured_window
    if window is None:
        return ()
    rows: list[tuple[Scalar, ...]] = []
    for scale in _scales(stats, window):
        predicted, real = window.at(scale), stats.measured(scale)
        rows.append(
            (
                power(scale),
                "yes" if window.contains(scale) else "no",
                predicted.lost,
                predicted.tensor if predicted.lost else "",
                predicted.pooled,
                predicted.overflows[0] if predicted.overflows else "no",
                None if real is None else real[0],
                None if real is None else ("yes" if real[1] else "no"),
            )
        )
    columns = (
        "scale", "in the window", "lost, worst tensor", "tensor", "lost, all tensors", "overflows", "measured lost",
        "measured overflow",
    )  # fmt: skip
    note = (
        f"lost: share of the nonzero elements that round to zero in float16, predicted from {window.nonzero:,} "
        f"elements of {len(window.histograms)} unscaled gradients; measured: in real backward passes"
    )
    if stats.scale is not None and is_usable(stats.scale):
        note += f"; in use: {power(stats.scale)}"
    return (Table(f"Loss scales: {stats.subject}", columns, rows, "loss-scale", note),)


def loss_scale_chart(stats: LossScaleStats) -> tuple[Chart, ...]:
    """log2 of the scale over the steps, with the ends of the window; a skipped step is a stroke downwards."""
    known = [(float(step), math.log2(scale), bad) for step, scale, bad in stats.trajectory if 0 < scale < math.inf]
    if not known:
        return ()
    known, left_out = _turns(known)
    steps, levels, _ = zip(*known, strict=True)
    series = [Series("scale", steps, levels)]
    ends = (min(steps), max(steps))
    window = stats.measured_window
    if window is not None:
        series.append(Series("largest that overflows nowhere", ends, (float(window.allowed),) * 2, "window"))
        series.append(Series("smallest that loses little", ends, (float(window.needed),) * 2, "window"))
    skipped = [(step, y) for step, y, bad in known if bad]
    if skipped:
        x = [step for step, _ in skipped for _ in range(3)][:-1]  # a gap parts one stroke from the next
        strokes = [value for _, y in skipped for value in (y, y - 1, math.nan)][:-1]
        series.append(Series("skipped step", tuple(x), tuple(strokes), "skipped"))
    title = f"Loss scale over the steps: {stats.subject}"
    notes = ["between the two lines of the window no tensor loses more than the share, and none overflows"]
    notes = [*(notes if window else ()), *([f"{left_out} turns in the middle are left out"] if left_out else ())]
    label, note = "log2 of the loss scale", "; ".join(notes)
    return (Chart("line", title, "step", label, tuple(series), check="loss-scale", note=note),)


def _turns(known: list[tuple[float, float, bool]]) -> tuple[list[tuple[float, float, bool]], int]:
    """The steps around which the scale changes or that are skipped, with the first and the last; and how many of them
    are left out in the middle."""
    turns = [
        step
        for i, step in enumerate(known)
        if i in (0, len(known) - 1) or step[2] or not known[i - 1][1] == step[1] == known[i + 1][1]
    ]
    left_out = max(0, len(turns) - _POINTS)
    return (turns[: _POINTS // 2] + turns[-(_POINTS // 2) :] if left_out else turns), left_out


def window_chart(stats: LossScaleStats) -> tuple[Chart, ...]:
    """The share lost over log2 of the scale, predicted and measured, with the window as a band."""
    window = stats.measured_window
    if window is None:
        return ()
    scales = _scales(stats, window)
    x = [math.log2(scale) for scale in scales]
    predicted = [window.at(scale) for scale in scales]
    series = [
        Series("worst tensor", x, [at.lost for at in predicted]),
        Series("all tensors", x, [at.pooled for at in predicted]),
    ]
    if real := [(math.log2(scale), lost) for scale, lost, overflows in stats.verified if not overflows]:
        series.append(Series("worst tensor", [at for at, _ in real], [lost for _, lost in real], "measured"))
    if stats.scale is not None and is_usable(stats.scale):
        series.append(Series("scale in use", (math.log2(stats.scale),) * 2, (0.0, 1.0), "in use"))
    bands = () if window.empty else (Band("window", float(window.needed), float(window.allowed)),)
    title = f"Gradients lost at each loss scale: {stats.subject}"
    note = f"above 2^{window.allowed} {window.allowed_by or 'a gradient'} overflows in float16"
    return (Chart("line", title, "log2 of the loss scale", "share lost", series, bands, "loss-scale", note),)


def _scales(stats: LossScaleStats, window: ScaleWindow) -> list[float]:
    """Powers of two around both ends, thinned out between ends far apart, the verified ones and the one in use."""
    low, high = sorted((window.needed, window.allowed))
    between = range(max(low - _BEYOND, -1022), min(high + _BEYOND, 1023) + 1)
    stride = math.ceil(len(between) / _ROWS)
    exponents = {e for e in between if e % stride == 0 or min(abs(e - low), abs(e - high)) <= _BEYOND}
    scales = {math.ldexp(1.0, e) for e in exponents} | {scale for scale, _, _ in stats.verified}
    in_use = {stats.scale} if stats.scale is not None and is_usable(stats.scale) else set()
    return sorted(scales | in_use)
