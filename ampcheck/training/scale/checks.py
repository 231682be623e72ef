"""Whether the loss scale in use keeps the gradients of a training loop inside their format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

from ampcheck.formats import format_of
from ampcheck.record import Finding, Verdict, Where, passed
from ampcheck.settings import Limits
from ampcheck.training.scale.stats import LossScaleStats
from ampcheck.training.scale.trajectory import COLLAPSE, has_fallen, is_settled, skipped_last
from ampcheck.training.window import POOL, ScaleWindow

CHECK = "loss-scale"
_LISTED = 3
_PART = "keep that module in float32 (torch.autocast(enabled=False) around it) or use bfloat16"


def check_loss_scale(stats: LossScaleStats, limits: Limits) -> list[Finding]:
    """The findings of `loss-scale`.

    A scaler lives above the window for a while: it starts too high, and grows until a gradient overflows. Skipping
    steps there and backing off is no finding. What is one: no scale serves, the scale in use loses more than
    `limits.underflow`, every step is skipped where the window says it need not be, the scale fell below 1, or it is no
    positive finite number any more.
    """
    if stats.enabled and stats.unusable is not None:
        return [_unusable(stats, *stats.unusable)]
    found = [*_collapsed(stats), *_window(stats, limits)]
    if found:
        return found
    if reason := _unjudged(stats):
        return [Finding(CHECK, Verdict.SKIP, stats.subject, reason)]
    if stats.scale is None:
        return [_not_yet(stats)]
    if stats.damage:
        return [_damaged(stats)]
    return [_passed(stats)]


def _known(stats: LossScaleStats) -> ScaleWindow | None:
    """The window, where it says something: gradients of a narrow format, and not all of them zero."""
    if not stats.format or _reaches_far(stats.format) or stats.window is None or not stats.window.nonzero:
        return None
    return stats.window


def _reaches_far(name: str) -> bool:
    return format_of(name).min_exponent <= format_of("float32").min_exponent


def _unjudged(stats: LossScaleStats) -> str:
    if not stats.format:
        return "no gradient of 16 bits flows: there is nothing that a loss scale would have to save"
    if _reaches_far(stats.format):
        return f"{stats.format} reaches as far as float32: its gradients need no loss scale"
    if stats.window is None:
        return "no unscaled gradient was measured, so that no window of loss scales is known"
    if not stats.window.nonzero:
        bad = f", {_nonfinite(stats.window)}" if stats.window.nonfinite else ""
        return f"no measured gradient has a finite, nonzero element{bad}: every loss scale is as good"
    if stats.scale is None and not stats.trajectory:
        return f"no optimizer was stepped through the scaler; {_span(stats.window)}"
    return ""


def _collapsed(stats: LossScaleStats) -> list[Finding]:
    if not stats.enabled or not stats.trajectory:
        return []
    window = _known(stats)
    finite = [scale for scale, _, over in stats.verified if not over]
    ends = [end for end in (window.high if window else None, max(finite, default=None)) if end is not None]
    ceiling = min(ends, default=None)
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
        observed, limit, unit = last, 1.0, "scale, at least"
    else:
        return []
    works = is_settled(window, *stats.trajectory[-1][1:])
    verdict = Verdict.WARN if works and skipped < COLLAPSE else Verdict.FAIL
    message = f"the loss scale must settle where gradients are finite; {text}{_skips(stats)}"
    if window:
        message += f"; {_span(window)}"
    if window and window.nonfinite:
        message += f"; {_nonfinite(window)}"
    hint = (
        "keep one GradScaler for the whole run and call scaler.update() in each step, with a backoff_factor below 1"
        if stands
        else "its gradients are that large: average the loss instead of summing it"
        if verdict is Verdict.WARN
        else "what is not finite at any scale comes from the forward pass or from one op of the backward pass, not "
        "from the scale: see overflow and nonfinite-gradient, and keep that op in float32"
    )
    step = next((step for step, _, bad in stats.trajectory if bad), None)
    place = Where("backward", op=stats.first_op, step=step)
    return [Finding(CHECK, verdict, stats.subject, message, place, observed, limit, unit, hint)]


def _unusable(stats: LossScaleStats, step: int, scale: float) -> Finding:
    """A scale of 0, infinity or NaN turns every gradient into 0, infinity or NaN, and GradScaler never leaves it."""
    before = [(number, skipped) for number, _, skipped in stats.trajectory if number < step]
    message = f"the loss scale must be a positive number whose inverse is finite in float32; it is {scale:.6g}"
    op = ""
    if not before:
        message += f" from the first step on, in all of {len(stats.trajectory)} steps"
        hint = (
            "give GradScaler a positive finite init_scale, and check the 'scale' of a checkpoint before "
            "scaler.load_state_dict(): one that was saved after a collapse keeps every later run from learning"
        )
    elif scale < 1:
        op, skips = stats.first_op, sum(skipped for _, skipped in before)
        message += (
            f" from step {step} on, after {power(stats.trajectory[0][1])} in step {stats.trajectory[0][0]}"
            f"{f' and {skips} skipped step' + 's' * (skips > 1) if skips else ''}{_skips(stats)}"
        )
        hint = (
            "gradients that are infinite or NaN at any scale halve it in every step: mend what makes them (see "
            "overflow and nonfinite-gradient, and keep that op in float32), and stop a run whose scale falls below 1"
        )
    else:
        message += f" from step {step} on, after {power(stats.trajectory[0][1])} in step {stats.trajectory[0][0]}"
        hint = "use a growth_factor near 2, and give scaler.update(new_scale) a finite number only"
    place = Where("backward", op=op, step=step)
    return Finding(CHECK, Verdict.FAIL, stats.subject, message, place, scale, None, "loss scale", hint)


def _skipped_at_one_scale(trajectory: Sequence[tuple[int, float, bool]]) -> int:
    """How many steps at the end were skipped, at a scale that none of them made smaller."""
    skipped = list(takewhile(lambda one: one[2], reversed(trajectory)))
    return len(skipped) if skipped and skipped[0][1] >= skipped[-1][1] else 0


def _window(stats: LossScaleStats, limits: Limits) -> list[Finding]:
    window = _known(stats)
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
        return [_without_scaler(stats.subject, window, verdict)]
    if real is not None and real[0] > limits.underflow:
        message = (
            f"{_required(limits.underflow, window)}; at {power(stats.scale)} the gradients by themselves would lose "
            f"{_percent(window.lost(stats.scale))}, and a real backward pass lost {_percent(real[0])}: the rest "
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
        f"{_percent(lost.lost)} of {lost.tensor} are lost ({_evidence(window)}{_in_use(stats)})"
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
        f"gradients must be finite at some loss scale; {_span(window)}, but a real backward pass overflows even at "
        f"{power(window.low or 1.0)}, and none of {len(stats.trajectory)} steps was taken{_skips(stats)}"
    )
    hint = "an op inside overflows before the gradients do: see overflow and nonfinite-gradient"
    return [Finding(CHECK, Verdict.FAIL, stats.subject, message, Where("backward", op=stats.first_op), hint=hint)]


def _below(stats: LossScaleStats, window: ScaleWindow, limits: Limits) -> Finding:
    scale = stats.scale or 1.0
    lost, real = window.at(scale), stats.measured(scale)
    share = real[0] if real else lost.lost
    using = f"the loss scale {power(scale)}" if stats.enabled else "without a loss scale"
    message = (
        f"{_required(limits.underflow, window)}; {using} {'loses ' if stats.enabled else ''}{_percent(lost.lost)} of "
        f"{lost.tensor}{'' if stats.enabled else ' are lost'}{_measured(stats)}; {_span(window)} "
        f"({_evidence(window)}){_skips(stats)}"
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


def _without_scaler(subject: str, window: ScaleWindow, verdict: Verdict) -> Finding:
    message = (
        f"gradients must stay below {format_of(window.format).max:g} in {window.format}; without a loss scale "
        f"{window.allowed_by} {'overflows' if verdict is Verdict.FAIL else 'would overflow'}; {_span(window)} "
        f"({_evidence(window)})"
    )
    hint = f"average the loss instead of summing it, or {_PART}"
    return Finding(CHECK, verdict, subject, message, Where("backward", module=window.allowed_by), hint=hint)


def _not_yet(stats: LossScaleStats) -> Finding:
    window = _known(stats)
    message = (
        f"no step of {len(stats.trajectory)} was taken yet, the scale is going from {power(stats.trajectory[0][1])} to "
        f"{power(stats.last_scale or stats.trajectory[-1][1])}; {_span(window) if window else ''}{_skips(stats)}"
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
    window, scale = _known(stats), stats.scale
    if window is None or scale is None:  # pragma: no cover  # `_unjudged` and `_not_yet` come before
        raise AssertionError("a window and a scale are known here")
    lost = window.at(scale)
    using = f"the scale in use, {power(scale)}, lies" if stats.enabled else "the scale 1, without a scaler, lies"
    message = (
        f"{_span(window)}; {using} {_place(window, scale)} and loses {_percent(lost.lost)}"
        f"{f' of {lost.tensor}' if lost.lost else ''}{_measured(stats)} ({_evidence(window)})"
        f"{_early(stats, window)}{_skips(stats)}"
    )
    if window.nonfinite:
        message += f"; {_nonfinite(window)}"
    place, unit = Where("backward"), "share lost"
    seen = window.nonzero
    return passed(CHECK, stats.subject, message, seen, where=place, observed=lost.lost, limit=window.share, unit=unit)


def _required(share: float, window: ScaleWindow) -> str:
    return f"at most {_percent(share)} of a tensor's nonzero gradient elements may round to zero in {window.format}"


def _span(window: ScaleWindow) -> str:
    if window.low is None or window.high is None:
        return f"no loss scale loses at most {_percent(window.share)} of a tensor and overflows nowhere"
    return (
        f"loss scales from {power(window.low)} to {power(window.high)} lose at most {_percent(window.share)} of a "
        f"tensor in {window.format} and overflow nowhere"
    )


def _evidence(window: ScaleWindow) -> str:
    return f"{window.nonzero:,} nonzero elements of {len(window.histograms):,} gradients"


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
    return f" (in a real backward pass {_percent(real[0])}{', and it overflows' if real[1] else ''})"


def _early(stats: LossScaleStats, window: ScaleWindow) -> str:
    """Real runs that overflow inside the window: an op on the way has larger values than the gradients measured."""
    over = [scale for scale, _, bad in stats.verified if bad and window.contains(scale)]
    return f"; real backward passes overflow from {power(min(over))} on" if over else ""


def _skips(stats: LossScaleStats) -> str:
    skipped = [step for step, _, bad in stats.trajectory if bad]
    if not skipped:
        return ""
    ordered = sorted(stats.skipped_by.items(), key=lambda item: (-item[1], item[0]))
    names = [f"{name} ({count}x)" for name, count in ordered[:_LISTED]]
    if more := len(ordered) - _LISTED:
        names += [f"{more} more"] if more > 0 else []
    text = f"; {len(skipped)} of {len(stats.trajectory)} steps were skipped, first step {skipped[0]}"
    text += f", not finite: {', '.join(names)}" if names else ""
    return text + (f", first in {stats.first_op}" if stats.first_op else "")


def _nonfinite(window: ScaleWindow) -> str:
    name, count = max(window.nonfinite.items(), key=lambda item: item[1])
    others = f" and {len(window.nonfinite) - 1} other tensors" if len(window.nonfinite) > 1 else ""
    return f"{count:,} elements of {name}{others} are infinite or NaN without any scale"


def power(scale: float) -> str:
    """A scale as one reads it: a power of two with its exponent, `2^16`; small ones, and all others, in digits."""
    mantissa, exponent = math.frexp(scale)
    if mantissa == 0.5 and not 1 <= scale <= 1024:
        return f"2^{exponent - 1}"
    return f"{scale:.6g}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
