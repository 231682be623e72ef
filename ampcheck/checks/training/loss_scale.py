"""Requires: At the loss scale in use, no parameter's float16 gradient loses more than `underflow` of its nonzero
elements to zero. Fails when no scale works (one tensor needs a larger scale than another can tolerate), when the scale
in use is too small, and when the scaler collapsed: the last 8 steps or more were all skipped at scales that should do,
or the scale fell below 1. Backing off after an overflow and temporarily exceeding the window are normal for a
GradScaler and are not reported. So they are for a loss scale that the code has of its own.

Measured: The unscaled gradients are counted by binade in float64. Scaling by a power of two moves all of them by whole
binades and rounding is monotone, so the counts give for each scale what rounds to zero (up to half of the smallest
subnormal) and what overflows (from 65520 on), the largest value of the whole backward pass included. The window is the
interval of scales that do neither. Every call of scaler.step and scaler.update is followed: scale, growth, back-off,
skipped steps, the parameters that were not finite and the op where it began. ampcheck.watch follows the scale and the
skipped steps: it fails when the scale falls below 1 or when the last ten steps or more were all skipped after one that
was made, and warns when more are skipped than growth explains.

Causes: float16 without a scaler; a loss divided by much, or one small part of it next to a large one; a scale that is
fixed or starts low; a NaN or an overflow in the forward pass, which no scale fixes and which makes the scaler back off
for ever; a summed loss.

Fix: Use torch.amp.GradScaler, with an init_scale inside the window; scale the parts of a loss separately; keep the
module that binds an end in float32, or use bfloat16. After a collapse, average or divide a loss that needs a scale
below 1; where no scale works, fix the op that the finding names.
"""

from __future__ import annotations

import math
from itertools import takewhile

from ampcheck.checks.training._scales import (
    finite_scales_text,
    first_op,
    mend_every_scale,
    nonfinite_text,
    skips_text,
    span_text,
    too_large,
)
from ampcheck.core.check import Check, Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.subject import Kind
from ampcheck.core.text import percent
from ampcheck.records.scales import COLLAPSE, POOL, LossScaleStats, ScaleWindow, power

CHECK = Check(
    "loss-scale",
    "training",
    __doc__,
    subjects=(Kind.TRAINING, Kind.CALL),
    needs=("LossScaleStats",),
    order=601,
    evidence=("tests/corpus/training/scale_too_small_for_the_loss", "tests/corpus/training/scaler_made_anew_each_step"),
)

_FLOAT32_MODULE = "keep that module in float32 (torch.autocast(enabled=False) around it) or use bfloat16"
_INIT_SCALE_HINT = (
    "give GradScaler a positive finite init_scale, and check the 'scale' of a checkpoint before "
    "scaler.load_state_dict(): one that was saved after a collapse keeps every later run from learning"
)


def check(stats: LossScaleStats, limits: Limits) -> list[Finding]:
    """The findings of `loss-scale`.

    A scaler is above the window for a while: it starts too high, and grows until a gradient overflows. Skipping steps
    there and backing off is no finding. Findings are: no scale is in the window, the scale in use loses more than
    `limits.underflow`, every step is skipped though the window predicts finite gradients, the scale fell below 1, or it
    is not a positive finite number. It warns of steps that are skipped again and again. The window of gradients that
    were only counted says no more than where a scale settles.
    """
    if stats.enabled and stats.unusable is not None:
        return [_unusable(stats, *stats.unusable)]
    findings = _collapse(stats)
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
        return [CHECK.skip(stats.subject, reason)]
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
    return CHECK.fail(stats.subject, message, where=where, observed=scale, unit="loss scale", hint=hint)


def _often(stats: LossScaleStats, share: float) -> Finding:
    message = (
        f"once a scale is found, a step is skipped where it has grown too far; {percent(share)} of the steps after the "
        f"first that was taken were skipped{skips_text(stats)}"
    )
    hint = f"leave batches with infinities or NaN out; {mend_every_scale(stats)}"
    shown = Evidence(where=first_op(stats), observed=share, unit="of the steps", hint=hint)
    return CHECK.warn(stats.subject, message, **shown)


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
    return [CHECK.warn(stats.subject, message, **shown)]


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
    return CHECK.finding(verdict, stats.subject, message, **_share(where, lost.lost, window.share, hint))


def _never(stats: LossScaleStats, window: ScaleWindow) -> list[Finding]:
    """No step was taken: a real run that overflows at the lower end of the window shows that none will be."""
    if not any(over and window.low is not None and scale <= window.low for scale, _, over in stats.verified):
        return []
    message = (
        f"gradients must be finite at some loss scale; {finite_scales_text(stats, window)}, and none of "
        f"{len(stats.trajectory)} steps was taken{skips_text(stats)}"
    )
    return [CHECK.fail(stats.subject, message, where=first_op(stats), hint=mend_every_scale(stats))]


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
    return CHECK.fail(stats.subject, message, **shown)


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
    return CHECK.finding(verdict, stats.subject, message, where=where, hint=hint)


def _no_step_yet(stats: LossScaleStats, window: ScaleWindow | None) -> Finding:
    span = f"; {span_text(window)}" if window is not None else ""
    message = (
        f"no step of {len(stats.trajectory)} was taken yet, the scale is going from {power(stats.trajectory[0][1])} to "
        f"{power(stats.last_scale or stats.trajectory[-1][1])}{span}{skips_text(stats)}"
    )
    hint = "observe more steps ('steps' in the mapping), or start lower (init_scale)"
    return CHECK.undecided(stats.subject, message, hint=hint)


def _damaged(stats: LossScaleStats) -> Finding:
    message = f"the loss scale must keep the gradients above what {stats.format} rounds to zero{stats.damage}"
    hint = (
        "start higher (init_scale) or let the scale grow sooner (a smaller growth_interval)"
        if stats.enabled
        else "scale the loss: torch.amp.GradScaler finds a scale, for float32 parameters; or use bfloat16"
    )
    return CHECK.fail(stats.subject, message, where=Where("backward"), hint=hint)


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
    return CHECK.passed(stats.subject, message, window.nonzero, **shown)


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


def _collapse(stats: LossScaleStats) -> list[Finding]:
    """Return whether the last steps were all skipped though gradients should be finite, or the scale fell below 1."""
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
            hint = too_large(first, finite)
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
    return [CHECK.finding(verdict, stats.subject, message, **shown)]
