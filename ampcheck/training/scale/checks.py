"""`loss-scale`: whether the loss scale keeps the gradients inside their format, and whether it collapses."""

from __future__ import annotations

import math

from ampcheck.catalog.training import LOSS_SCALE
from ampcheck.core.check import Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.text import percent
from ampcheck.training.loss_scale_window import POOL, ScaleWindow
from ampcheck.training.scale.settling import (
    collapse,
    finite_scales_text,
    first_op,
    mend_every_scale,
    nonfinite_text,
    skips_text,
    span_text,
)
from ampcheck.training.scale.stats import LossScaleStats, power

_FLOAT32_MODULE = "keep that module in float32 (torch.autocast(enabled=False) around it) or use bfloat16"
_INIT_SCALE_HINT = (
    "give GradScaler a positive finite init_scale, and check the 'scale' of a checkpoint before "
    "scaler.load_state_dict(): one that was saved after a collapse keeps every later run from learning"
)


def check_loss_scale(stats: LossScaleStats, limits: Limits) -> list[Finding]:
    """The findings of `loss-scale`.

    A scaler is above the window for a while: it starts too high, and grows until a gradient overflows. Skipping steps
    there and backing off is no finding. Findings are: no scale is in the window, the scale in use loses more than
    `limits.underflow`, every step is skipped though the window predicts finite gradients, the scale fell below 1, or it
    is not a positive finite number. It warns of steps that are skipped again and again. The window of gradients that
    were only counted says no more than where a scale settles.
    """
    if stats.enabled and stats.unusable is not None:
        return [_unusable(stats, *stats.unusable)]
    findings = collapse(stats)
    window = stats.measured_window
    if window is not None and not stats.counted and (not findings or stats.scale is not None or window.empty):
        findings += _against_window(stats, window, limits)
    if not findings and (share := stats.often_skipped) is not None:
        findings = [_often(stats, share)]
    if findings:
        return findings
    if stats.counted and stats.trajectory and stats.scale is None:
        return [_no_step_yet(stats, window)]
    if reason := _not_judged(stats):
        return [LOSS_SCALE.skip(stats.subject, reason)]
    assert window is not None
    if stats.scale is None:
        return [_no_step_yet(stats, window)]
    if stats.damage:
        return [_damaged(stats)]
    return [_passed(stats, window, stats.scale)]


def _unusable(stats: LossScaleStats, step: int, scale: float) -> Finding:
    """A scale of 0, infinity or NaN turns every gradient into 0, infinity or NaN, and GradScaler never leaves it."""
    before = [skipped for number, _, skipped in stats.trajectory if number < step]
    where = Where("backward", step=step)
    first = stats.trajectory[0]
    since = f"from step {step} on, after {power(first[1])} in step {first[0]}"
    if not before:
        since, hint = f"from the first step on, in all of {len(stats.trajectory)} steps", _INIT_SCALE_HINT
    elif scale >= 1 or math.isnan(scale):
        hint = "use a growth_factor near 2, and give scaler.update(new_scale) a finite number only"
    else:
        skipped, where = sum(before), first_op(stats, step)
        since += f" and {skipped} skipped step{'s' * (skipped > 1)}" if skipped else ""
        since += skips_text(stats)
        hint = (
            "gradients that are infinite or NaN at any scale halve it in every step: mend what makes them (see "
            "overflow and nonfinite-gradient, and keep that op in float32), and stop a run whose scale falls below 1"
        )
    message = f"the loss scale must be a positive number whose inverse is finite in float32; it is {scale:.6g} {since}"
    return LOSS_SCALE.fail(stats.subject, message, where=where, observed=scale, unit="loss scale", hint=hint)


def _often(stats: LossScaleStats, share: float) -> Finding:
    message = (
        f"once a scale is found, a step is skipped where it has grown too far; {percent(share)} of the steps after the "
        f"first that was taken were skipped{skips_text(stats)}"
    )
    hint = f"leave batches with infinities or NaN out; {mend_every_scale(stats)}"
    shown = Evidence(where=first_op(stats), observed=share, unit="of the steps", hint=hint)
    return LOSS_SCALE.warn(stats.subject, message, **shown)


def _not_judged(stats: LossScaleStats) -> str:
    window = stats.window
    if stats.counted and not stats.enabled:
        return "the scaler is switched off (enabled=False)"
    if stats.enabled and stats.trajectory and not stats.updated:
        return f"scaler.update() was not called in {len(stats.trajectory)} steps: see scaler-protocol"
    if not stats.format:
        return "no gradient of 16 bits flows: there is nothing that a loss scale would have to save"
    if stats.format == "bfloat16":
        return "bfloat16 reaches as far as float32: its gradients need no loss scale"
    if window is None:
        return "no unscaled gradient was measured, so that no window of loss scales is known"
    if not window.nonzero:
        bad = f", {nonfinite_text(window)}" if window.nonfinite else ""
        return f"no measured gradient has a finite, nonzero element{bad}: every loss scale is as good"
    if stats.scale is None and not stats.trajectory:
        return f"no optimizer was stepped through the scaler; {span_text(window)}"
    return ""


def _against_window(stats: LossScaleStats, window: ScaleWindow, limits: Limits) -> list[Finding]:
    if window.empty:
        return [_empty(stats, window, limits)]
    if stats.scale is None:
        return _never(stats, window)
    real = stats.measured(stats.scale)
    lost = real[0] if real else window.at(stats.scale, at_least=True).lost
    if window.low is not None and stats.scale < window.low and lost > limits.underflow:
        return [_below(stats, window, stats.scale, limits)]
    if not stats.enabled and (verdict := _overflows(stats, window)):
        return [_without_scaler(stats, window, verdict)]
    if real is None or real[0] <= limits.underflow:
        return []
    message = (
        f"{_required(limits.underflow)}; at {power(stats.scale)} the gradients by themselves would lose "
        f"{percent(window.at(stats.scale).lost)}, and a real backward pass lost {percent(real[0])}: the rest "
        f"vanishes on the way"
    )
    hint = "no scale mends what is lost in the forward pass: see gradient-underflow for the tensors"
    shown = _share(Where("backward"), real[0], limits.underflow, hint)
    return [LOSS_SCALE.warn(stats.subject, message, **shown)]


def _empty(stats: LossScaleStats, window: ScaleWindow, limits: Limits) -> Finding:
    lost = window.at(math.ldexp(1.0, window.allowed))
    in_use = "no scaler is in use"
    if stats.enabled:
        in_use = f"in use is {power(stats.scale_in_use)}" if stats.scale_in_use else "no step was taken"
    message = (
        f"{_required(window.share)} and nothing may overflow; no loss scale does both: {window.needed_by} "
        f"needs 2^{window.needed} or more, {window.allowed_by} overflows above 2^{window.allowed}, where "
        f"{percent(lost.lost)} of {lost.tensor} are lost ({_evidence(window)}; {in_use})"
    )
    hint = (
        f"{_FLOAT32_MODULE}: {window.needed_by} or {window.allowed_by}; or scale the parts of the loss that they "
        f"belong to separately"
    )
    verdict = Verdict.FAIL
    if serve := [scale for scale, gone, over in stats.verified if gone <= limits.underflow and not over]:
        verdict = Verdict.WARN
        message += f"; a real backward pass at {power(max(serve))} did both, so not all of this flows in {stats.format}"
    where = Where("backward", module="" if window.needed_by == POOL else window.needed_by)
    return LOSS_SCALE.finding(verdict, stats.subject, message, **_share(where, lost.lost, window.share, hint))


def _never(stats: LossScaleStats, window: ScaleWindow) -> list[Finding]:
    """No step was taken: a real run that overflows at the lower end of the window shows that none will be."""
    if not any(over and window.low is not None and scale <= window.low for scale, _, over in stats.verified):
        return []
    message = (
        f"gradients must be finite at some loss scale; {finite_scales_text(stats, window)}, and none of "
        f"{len(stats.trajectory)} steps was taken{skips_text(stats)}"
    )
    return [LOSS_SCALE.fail(stats.subject, message, where=first_op(stats), hint=mend_every_scale(stats))]


def _below(stats: LossScaleStats, window: ScaleWindow, scale: float, limits: Limits) -> Finding:
    lost, real = window.at(scale), stats.measured(scale)
    text = f"{percent(lost.lost)} of {lost.tensor}"
    text = f"the loss scale {power(scale)} loses {text}" if stats.enabled else f"without a loss scale {text} are lost"
    on_the_way = stats.real_lost.get(lost.tensor)
    if on_the_way is not None and stats.real_scale == scale and percent(on_the_way) != percent(lost.lost):
        counted = f"{percent(on_the_way)} in the real backward pass that gradient-underflow counts"
        text += f" by the last rounding alone ({counted})"
    message = (
        f"{_required(limits.underflow)}; {text}{_measured(stats)}; {span_text(window)} "
        f"({_evidence(window)}){skips_text(stats)}"
    )
    hint = (
        f"start higher (init_scale=2.0**{window.allowed}) or let the scale grow sooner (a smaller growth_interval)"
        if stats.enabled
        else "scale the loss: torch.amp.GradScaler finds a scale near the upper end; or use bfloat16"
    )
    where = Where("backward", module="" if lost.tensor == POOL else lost.tensor)
    shown = _share(where, real[0] if real else lost.lost, limits.underflow, hint)
    return LOSS_SCALE.fail(stats.subject, message, **shown)


def _overflows(stats: LossScaleStats, window: ScaleWindow) -> Verdict | None:
    """Without a scaler: whether the gradients overflow unscaled. A real run decides where there is one."""
    if any(over and scale <= 1 for scale, _, over in stats.verified):
        return Verdict.FAIL
    if any(not over and scale >= 1 for scale, _, over in stats.verified):
        return None
    return Verdict.WARN if window.at(1.0).overflows else None


def _without_scaler(stats: LossScaleStats, window: ScaleWindow, verdict: Verdict) -> Finding:
    message = (
        "gradients must stay below 65504 in float16; without a loss scale "
        f"{window.allowed_by} {'overflows' if verdict is Verdict.FAIL else 'would overflow'}; "
        f"{finite_scales_text(stats, window)} ({_evidence(window)})"
    )
    hint = f"average the loss instead of summing it, or {_FLOAT32_MODULE}"
    where = Where("backward", module=window.allowed_by)
    if stats.hopeless:
        hint, where = mend_every_scale(stats), first_op(stats)
    return LOSS_SCALE.finding(verdict, stats.subject, message, where=where, hint=hint)


def _no_step_yet(stats: LossScaleStats, window: ScaleWindow | None) -> Finding:
    span = f"; {span_text(window)}" if window is not None else ""
    message = (
        f"no step of {len(stats.trajectory)} was taken yet, the scale is going from {power(stats.trajectory[0][1])} to "
        f"{power(stats.last_scale or stats.trajectory[-1][1])}{span}{skips_text(stats)}"
    )
    hint = "observe more steps ('steps' in the mapping), or start lower (init_scale)"
    return LOSS_SCALE.undecided(stats.subject, message, hint=hint)


def _damaged(stats: LossScaleStats) -> Finding:
    message = f"the loss scale must keep the gradients above what {stats.format} rounds to zero{stats.damage}"
    hint = (
        "start higher (init_scale) or let the scale grow sooner (a smaller growth_interval)"
        if stats.enabled
        else "scale the loss: torch.amp.GradScaler finds a scale, for float32 parameters; or use bfloat16"
    )
    return LOSS_SCALE.fail(stats.subject, message, where=Where("backward"), hint=hint)


def _passed(stats: LossScaleStats, window: ScaleWindow, scale: float) -> Finding:
    lost = window.at(scale)
    room = window.allowed - math.log2(scale)
    position = (
        f"inside, {room:.3g} binades below the upper end"
        if window.contains(scale)
        else f"{-room:.3g} binades above it"
        if room < 0
        else f"{window.needed - math.log2(scale):.3g} binades below it"
    )
    using = f"the scale in use, {power(scale)}, is" if stats.enabled else "the scale 1, without a scaler, is"
    loses = f" and loses {percent(lost.lost)}{f' of {lost.tensor}' if lost.lost else ''}{_measured(stats)}"
    message = f"{span_text(window)}; {using} {position}{loses} ({_evidence(window)})"
    if stats.counted:
        scales = [tried for _, tried, _ in stats.trajectory]
        message = (
            f"the scale went from {power(scales[0])} to {power(scale)}, between {power(min(scales))} and "
            f"{power(max(scales))}; {span_text(window)}, of what had not vanished "
            f"({_evidence(window)}; {stats.counted})"
        )
    # An op on the way has larger values than the gradients measured.
    if over := [tried for tried, _, overflows in stats.verified if overflows and window.contains(tried)]:
        message += f"; real backward passes overflow from {power(min(over))} on"
    message += skips_text(stats)
    if window.nonfinite:
        message += f"; {nonfinite_text(window)}"
    shown = _share(Where("backward"), lost.lost, window.share)
    return LOSS_SCALE.passed(stats.subject, message, window.nonzero, **shown)


def _share(where: Where, observed: float, limit: float, hint: str = "") -> Evidence:
    return Evidence(where=where, observed=observed, limit=limit, unit="share lost", hint=hint)


def _required(share: float) -> str:
    return f"at most {percent(share)} of a tensor's nonzero gradient elements may round to zero in float16"


def _measured(stats: LossScaleStats) -> str:
    real = stats.measured(stats.scale)
    if real is None:
        return ""
    return f" (in a real backward pass {percent(real[0])}{', and it overflows' if real[1] else ''})"


def _evidence(window: ScaleWindow) -> str:
    return f"{window.nonzero:,} nonzero elements of {len(window.histograms):,} gradients"
