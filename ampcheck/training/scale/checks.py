"""Whether the loss scale in use keeps the gradients of a training loop inside their format."""

from __future__ import annotations

import math

from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where, passed
from ampcheck.training.scale.collapse import CHECK, check_collapse, check_unusable, mend_every_scale, place_of
from ampcheck.training.scale.stats import LossScaleStats
from ampcheck.training.scale.words import (
    evidence,
    has_empty_window,
    known_window,
    nonfinite,
    percent,
    power,
    reach,
    reaches_far,
    skips,
    span,
)
from ampcheck.training.window import POOL, ScaleWindow

_PART = "keep that module in float32 (torch.autocast(enabled=False) around it) or use bfloat16"


def check_loss_scale(stats: LossScaleStats, limits: Limits) -> list[Finding]:
    """The findings of `loss-scale`.

    A scaler lives above the window for a while: it starts too high, and grows until a gradient overflows. Skipping
    steps there and backing off is no finding. What is one: no scale serves, the scale in use loses more than
    `limits.underflow`, every step is skipped where the window says it need not be, the scale fell below 1, or it is no
    positive finite number any more.
    """
    if stats.enabled and stats.unusable is not None:
        return [check_unusable(stats, *stats.unusable)]
    collapsed = check_collapse(stats)
    never = bool(collapsed) and stats.scale is None  # the collapse says already that no step was taken
    found = [*collapsed, *([] if never and not has_empty_window(stats) else _window(stats, limits))]
    if found:
        return found
    if reason := _unjudged(stats):
        return [Finding(CHECK, Verdict.SKIP, stats.subject, reason)]
    if stats.scale is None:
        return [_not_yet(stats)]
    if stats.damage:
        return [_damaged(stats)]
    return [_passed(stats)]


def _unjudged(stats: LossScaleStats) -> str:
    if not stats.format:
        return "no gradient of 16 bits flows: there is nothing that a loss scale would have to save"
    if reaches_far(stats.format):
        return f"{stats.format} reaches as far as float32: its gradients need no loss scale"
    if stats.window is None:
        return "no unscaled gradient was measured, so that no window of loss scales is known"
    if not stats.window.nonzero:
        bad = f", {nonfinite(stats.window)}" if stats.window.nonfinite else ""
        return f"no measured gradient has a finite, nonzero element{bad}: every loss scale is as good"
    if stats.scale is None and not stats.trajectory:
        return f"no optimizer was stepped through the scaler; {span(stats.window)}"
    return ""


def _window(stats: LossScaleStats, limits: Limits) -> list[Finding]:
    window = known_window(stats)
    if window is None:
        return []
    if window.empty:
        return [_empty(stats, window, limits)]
    if stats.scale is None:
        return _never(stats, window)
    real = stats.measured(stats.scale)
    gone = real[0] if real else window.lost(stats.scale, at_least=True)
    below = window.low is not None and stats.scale < window.low
    if below and gone > limits.underflow:
        return [_below(stats, window, limits)]
    if not stats.enabled and (verdict := _overflows(stats, window)):
        return [_without_scaler(stats, window, verdict)]
    if real is not None and real[0] > limits.underflow:
        message = (
            f"{_required(limits.underflow, window)}; at {power(stats.scale)} the gradients by themselves would lose "
            f"{percent(window.lost(stats.scale))}, and a real backward pass lost {percent(real[0])}: the rest "
            f"vanishes on the way"
        )
        hint = "no scale mends what is lost in the forward pass: see gradient-underflow for the tensors"
        place = Where("backward")
        return [
            Finding(CHECK, Verdict.WARN, stats.subject, message, place, real[0], limits.underflow, "share lost", hint)
        ]
    return []


def _empty(stats: LossScaleStats, window: ScaleWindow, limits: Limits) -> Finding:
    lost = window.at(math.ldexp(1.0, window.allowed))
    message = (
        f"{_required(window.share, window)} and nothing may overflow; no loss scale does both: {window.needed_by} "
        f"needs 2^{window.needed} or more, {window.allowed_by} overflows above 2^{window.allowed}, where "
        f"{percent(lost.lost)} of {lost.tensor} are lost ({evidence(window)}{_in_use(stats)})"
    )
    hint = (
        f"{_PART}: {window.needed_by} or {window.allowed_by}; or scale the parts of the loss that they belong to "
        f"separately"
    )
    verdict = Verdict.FAIL
    if serve := [scale for scale, gone, over in stats.verified if gone <= limits.underflow and not over]:
        verdict = Verdict.WARN
        message += f"; a real backward pass at {power(max(serve))} did both, so not all of this flows in {stats.format}"
    place = Where("backward", module="" if window.needed_by == POOL else window.needed_by)
    return Finding(CHECK, verdict, stats.subject, message, place, lost.lost, window.share, "share lost", hint)


def _never(stats: LossScaleStats, window: ScaleWindow) -> list[Finding]:
    """No step was taken: a real run that overflows at the lower end of the window says that none will be."""
    if not any(over and window.low is not None and scale <= window.low for scale, _, over in stats.verified):
        return []
    message = (
        f"gradients must be finite at some loss scale; {reach(stats, window)}, and none of {len(stats.trajectory)} "
        f"steps was taken{skips(stats)}"
    )
    return [Finding(CHECK, Verdict.FAIL, stats.subject, message, place_of(stats), hint=mend_every_scale(stats))]


def _below(stats: LossScaleStats, window: ScaleWindow, limits: Limits) -> Finding:
    scale = stats.scale or 1.0
    lost, real = window.at(scale), stats.measured(scale)
    share = real[0] if real else lost.lost
    using = f"the loss scale {power(scale)}" if stats.enabled else "without a loss scale"
    message = (
        f"{_required(limits.underflow, window)}; {using} {'loses ' if stats.enabled else ''}{percent(lost.lost)} of "
        f"{lost.tensor}{'' if stats.enabled else ' are lost'}{_on_the_way(stats, lost.tensor, lost.lost)}"
        f"{_measured(stats)}; {span(window)} "
        f"({evidence(window)}){skips(stats)}"
    )
    hint = (
        f"start higher (init_scale=2.0**{window.allowed}) or let the scale grow sooner (a smaller growth_interval)"
        if stats.enabled
        else "scale the loss: torch.amp.GradScaler finds a scale near the upper end; or use bfloat16"
    )
    place = Where("backward", module="" if lost.tensor == POOL else lost.tensor)
    return Finding(CHECK, Verdict.FAIL, stats.subject, message, place, share, limits.underflow, "share lost", hint)


def _overflows(stats: LossScaleStats, window: ScaleWindow) -> Verdict | None:
    """Without a scaler: whether the gradients overflow as they are. A real run decides where there is one."""
    if any(over and scale <= 1 for scale, _, over in stats.verified):
        return Verdict.FAIL
    if any(not over and scale >= 1 for scale, _, over in stats.verified):
        return None
    return Verdict.WARN if window.at(1.0).overflows else None


def _without_scaler(stats: LossScaleStats, window: ScaleWindow, verdict: Verdict) -> Finding:
    message = (
        f"gradients must stay below {format_of(window.format).max:g} in {window.format}; without a loss scale "
        f"{window.allowed_by} {'overflows' if verdict is Verdict.FAIL else 'would overflow'}; {reach(stats, window)} "
        f"({evidence(window)})"
    )
    hint = mend_every_scale(stats) if stats.hopeless else f"average the loss instead of summing it, or {_PART}"
    place = place_of(stats) if stats.hopeless else Where("backward", module=window.allowed_by)
    return Finding(CHECK, verdict, stats.subject, message, place, hint=hint)


def _not_yet(stats: LossScaleStats) -> Finding:
    window = known_window(stats)
    message = (
        f"no step of {len(stats.trajectory)} was taken yet, the scale is going from {power(stats.trajectory[0][1])} to "
        f"{power(stats.last_scale or stats.trajectory[-1][1])}; {span(window) if window else ''}{skips(stats)}"
    )
    hint = "observe more steps ('steps' in the mapping), or start lower (init_scale)"
    return Finding(CHECK, Verdict.UNDECIDED, stats.subject, message, hint=hint)


def _damaged(stats: LossScaleStats) -> Finding:
    message = f"the loss scale must keep the gradients above what {stats.format} rounds to zero{stats.damage}"
    hint = (
        "start higher (init_scale) or let the scale grow sooner (a smaller growth_interval)"
        if stats.enabled
        else "scale the loss: torch.amp.GradScaler finds a scale, for float32 parameters; or use bfloat16"
    )
    return Finding(CHECK, Verdict.FAIL, stats.subject, message, Where("backward"), hint=hint)


def _passed(stats: LossScaleStats) -> Finding:
    window, scale = known_window(stats), stats.scale
    if window is None or scale is None:  # pragma: no cover  # `_unjudged` and `_not_yet` come before
        raise AssertionError("a window and a scale are known here")
    lost = window.at(scale)
    using = f"the scale in use, {power(scale)}, lies" if stats.enabled else "the scale 1, without a scaler, lies"
    message = (
        f"{span(window)}; {using} {_place(window, scale)} and loses {percent(lost.lost)}"
        f"{f' of {lost.tensor}' if lost.lost else ''}{_measured(stats)} ({evidence(window)})"
        f"{_early(stats, window)}{skips(stats)}"
    )
    if window.nonfinite:
        message += f"; {nonfinite(window)}"
    place, unit = Where("backward"), "share lost"
    seen = window.nonzero
    return passed(CHECK, stats.subject, message, seen, where=place, observed=lost.lost, limit=window.share, unit=unit)


def _required(share: float, window: ScaleWindow) -> str:
    return f"at most {percent(share)} of a tensor's nonzero gradient elements may round to zero in {window.format}"


def _place(window: ScaleWindow, scale: float) -> str:
    room = window.allowed - math.log2(scale)
    if window.contains(scale):
        return f"inside, {room:.3g} binades below the upper end"
    return f"{-room:.3g} binades above it" if room < 0 else f"{window.needed - math.log2(scale):.3g} binades below it"


def _in_use(stats: LossScaleStats) -> str:
    if not stats.enabled:
        return "; no scaler is in use"
    return f"; in use is {power(stats.scale_in_use)}" if stats.scale_in_use else "; no step was taken"


def _measured(stats: LossScaleStats) -> str:
    real = stats.measured(stats.scale)
    if real is None:
        return ""
    return f" (in a real backward pass {percent(real[0])}{', and it overflows' if real[1] else ''})"


def _on_the_way(stats: LossScaleStats, tensor: str, lost: float) -> str:
    """What `gradient-underflow` counts of the same tensor at the same scale, where that is another share."""
    real = stats.real_lost.get(tensor)
    if real is None or stats.real_scale != stats.scale or percent(real) == percent(lost):
        return ""
    return f" by the last rounding alone ({percent(real)} in the real backward pass that gradient-underflow counts)"


def _early(stats: LossScaleStats, window: ScaleWindow) -> str:
    """Real runs that overflow inside the window: an op on the way has larger values than the gradients measured."""
    over = [scale for scale, _, bad in stats.verified if bad and window.contains(scale)]
    return f"; real backward passes overflow from {power(min(over))} on" if over else ""
