"""What a watched loop's numbers say. Pure functions from `WatchStats` to findings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise

from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where, passed
from ampcheck.training.monitor.expected import sampled
from ampcheck.training.monitor.folded import GradientSum, UpdateSum
from ampcheck.training.monitor.report import window_of
from ampcheck.training.monitor.stats import WatchedOptimizer, WatchedParameter, WatchStats
from ampcheck.training.scale.stats import has_fallen, is_settled
from ampcheck.training.window import is_usable

CHECKS = ("overflow", "nonfinite-gradient", "gradient-underflow", "loss-scale", "stagnation", "coverage")
"""The checks that a watched loop can be judged by, in the order in which a reader wants them."""

_LISTED = 5
"""How many parameters a check names before it only counts them."""

_SEVERAL = 3
"""Steps from which on what is true of each is said of the loop."""

_MANY = 32
"""Updates from which on a share of them is said of a parameter."""

_TOLD = 64.0
"""Moves that stochastic rounding would have made, from which on it says something that there were hardly any."""

_FEWER = 16
"""How many times fewer they are then: how far a step goes is known to a few times."""

_LASTING = 10
"""Skipped steps in a row that are no search for a scale any more: 2**10 is most of where GradScaler starts."""


def check_watched(stats: WatchStats, limits: Limits) -> list[Finding]:
    """The findings of `CHECKS`. A watch sees no reference, so that what only a shadow could prove is a warning."""
    if not stats.steps and not stats.attempts:
        message = "an optimizer step must have run in the block; none did, so nothing was looked at"
        hint = (
            "call optimizer.step() or scaler.step(optimizer) inside the block, on the optimizer that is watched; "
            "a step inside torch.compile is not seen"
        )
        return [Finding("coverage", Verdict.FAIL, stats.subject, message, hint=hint)]
    return [
        *_losses(stats),
        *_nonfinite(stats),
        *_underflow(stats, limits),
        *_scale(stats, limits),
        *_stagnation(stats, limits),
        _coverage(stats),
    ]


def _losses(stats: WatchStats) -> Iterator[Finding]:
    check = "overflow"
    if not stats.losses:
        return
    bad = [step for step, loss in enumerate(stats.losses) if not math.isfinite(loss)]
    if bad and bad[-1] == len(stats.losses) - 1:
        first = next(
            step for step in range(len(stats.losses)) if all(not math.isfinite(x) for x in stats.losses[step:])
        )
        message = f"the loss must be finite; it is {stats.losses[-1]} in the last of {len(stats.losses)} steps"
        hint = "ampcheck.audit names the op where the first infinity or NaN appears"
        where = Where("forward", step=first)
        yield Finding(check, Verdict.FAIL, stats.subject, message, where, float(len(bad)), 0.0, "steps", hint)
        return
    passing = f", after {len(bad)} that were not" if bad else ""
    text = f"the last of {len(stats.losses)} losses is finite{passing}"
    yield passed(check, stats.subject, text, len(stats.losses))


def _nonfinite(stats: WatchStats) -> Iterator[Finding]:
    check = "nonfinite-gradient"
    guarded = {one.name for one in stats.optimizers if one.guarded}
    seen = [one for one in stats.parameters if one.gradient is not None]
    if not seen:
        yield _skipped(stats, check, _unmeasured(stats))
        return
    found = []
    for one in seen:
        gradient, update = one.gradient, one.update
        assert gradient is not None
        spoilt = update.poisoned if update is not None else 0
        if spoilt:
            assert update is not None
            message = (
                f"weights must stay finite; {one.name} held an infinity or NaN after {spoilt:,} of {update.calls:,} "
                f"measured steps"
            )
            hint = "step through torch.amp.GradScaler, which leaves out a step with such gradients; see overflow"
            where = _where(one, "update", gradient.first if gradient.bad else None)
            found.append(Finding(check, Verdict.FAIL, stats.subject, message, where, float(spoilt), 0.0, "steps", hint))
        elif gradient.bad and one.optimizer not in guarded:
            health = gradient.health
            message = (
                f"a step must be made with finite gradients; that of {one.name} was not in {gradient.bad:,} of "
                f"{gradient.calls:,} measured steps ({health.infs:,} infinities, {health.nans:,} NaN), and the "
                "optimizer was stepped; its weights stayed finite"
            )
            hint = "leave such a step out (torch.amp.GradScaler does), or mend what overflows in forward"
            where = _where(one, "backward", gradient.first)
            found.append(
                Finding(check, Verdict.WARN, stats.subject, message, where, float(gradient.bad), 0.0, "steps", hint)
            )
    gone = f"; {stats.skipped:,} more were left out by the scaler" if stats.skipped else ""
    text = f"{stats.measured:,} measured steps were made with finite gradients{gone}"
    yield from _most(stats, found) or [passed(check, stats.subject, text, _gradients(seen))]


def _gradients(parameters: Iterable[WatchedParameter]) -> int:
    """How many gradients were measured."""
    return sum(one.gradient.calls for one in parameters if one.gradient)


def _underflow(stats: WatchStats, limits: Limits) -> Iterator[Finding]:
    """A hint: without a reference, a zero that was a number once looks like a zero by right."""
    check = "gradient-underflow"
    scaled = stats.scaler is not None and stats.scaler.enabled
    everywhere = [one for one in stats.parameters if one.gradient]
    nothing = all(one.gradient and one.gradient.vanished == one.gradient.calls for one in everywhere)
    seen = [one for one in everywhere if scaled or nothing or _in_float16(one.gradient)]
    if not seen:
        return
    hint = (
        "raise the loss scale (GradScaler grows it while nothing overflows), scale the loss if it is not, or use "
        "bfloat16; ampcheck.audit tells the share against a float32 backward"
    )
    found = []
    for one in seen:
        gradient = one.gradient
        assert gradient is not None
        health, calls = gradient.health, gradient.calls
        if calls >= _SEVERAL and gradient.vanished == calls:
            message = (
                f"gradients must not vanish; that of {one.name} was zero altogether in each of {calls:,} measured "
                "steps (float16 flushes what is too small, or nothing depends on it)"
            )
            found.append(
                Finding(check, Verdict.WARN, stats.subject, message, _where(one, "backward"), 1.0, limits.underflow,
                        "of the elements", hint)
            )  # fmt: skip
            continue
        if not health.nonzero or not health.finite:
            continue
        zeros = health.zeros / health.finite
        if zeros > limits.underflow and 2 * gradient.cut > calls:
            message = (
                f"at most {limits.underflow:.0%} of a gradient may become zero; of {one.name} {zeros:.0%} is zero, and "
                f"the rest ends abruptly at the smallest number of float16 in {gradient.cut:,} of {calls:,} measured "
                "steps: what is smaller was flushed"
            )
            found.append(
                Finding(check, Verdict.WARN, stats.subject, message, _where(one, "backward"), zeros, limits.underflow,
                        "of the elements", hint)
            )  # fmt: skip
    text = f"none of {len(seen)} gradients shows the marks of flushing (no proof: nothing was compared)"
    yield from _most(stats, found) or [passed(check, stats.subject, text, _gradients(seen))]


def _in_float16(gradient: GradientSum | None) -> bool:
    return gradient is not None and (gradient.health.dtype == "float16" or gradient.cut > 0)


def _scale(stats: WatchStats, limits: Limits) -> Iterator[Finding]:
    check, scaler = "loss-scale", stats.scaler
    if scaler is None:
        return
    if not scaler.enabled:
        yield _skipped(stats, check, "the scaler is switched off (enabled=False)")
        return
    if not stats.attempts:
        yield _skipped(stats, check, "no optimizer was stepped through the scaler")
        return
    scales, now = scaler.scales, scaler.scales[-1] if scaler.scales else math.nan
    story = _story(stats)
    worst = max(stats.optimizers, key=_trailing)
    trailing, where = _trailing(worst), Where("update", step=worst.skipped[-1] if worst.skipped else None)
    culprits = ", ".join(f"{name} ({count:,}x)" for name, count in list(scaler.culprits.items())[:_LISTED])
    named = f"; not finite were the gradients of {culprits}" if culprits else ""
    hint = (
        "a scale that falls without end means that a gradient is infinite or NaN at any scale: mend the overflow, or "
        "leave batches with NaN out; see nonfinite-gradient"
    )
    unusable = next((number for number, scale in enumerate(scales) if not is_usable(scale)), None)
    if unusable is not None:
        message = (
            "the loss scale must be a positive number whose inverse is finite in float32; it is "
            f"{scales[unusable]:.6g} {f'after {unusable:,} updates' if unusable else 'from the first step on'} "
            f"({story}){named}"
        )
        if not unusable:
            hint = "give GradScaler a positive finite init_scale, and check the 'scale' of a checkpoint that it loads"
        place = Where("update", step=unusable)
        yield Finding(check, Verdict.FAIL, stats.subject, message, place, scales[unusable], None, "loss scale", hint)
    elif scales and has_fallen(scales[0], now):
        settled = is_settled(window_of(stats, limits), now, trailing > 0)
        verdict = Verdict.WARN if settled else Verdict.FAIL
        message = f"the loss scale must stay at 1 or above; it fell to {now:g} ({story}){named}"
        hint = "its gradients are that large: average the loss instead of summing it" if settled else hint
        yield Finding(check, verdict, stats.subject, message, where, now, 1.0, "loss scale", hint)
    elif trailing >= _LASTING and trailing < worst.attempts:
        message = (
            f"a scaler that backs off must find a scale; the last {trailing:,} steps were skipped ({story}){named}"
        )
        yield Finding(
            check, Verdict.FAIL, stats.subject, message, where, float(trailing), float(_LASTING), "steps", hint
        )
    elif not stats.steps:
        message = f"steps must be made; all {stats.attempts:,} were skipped so far ({story}){named}"
        later = "start lower (init_scale) or run longer: GradScaler halves the scale until the gradients are finite"
        yield Finding(check, Verdict.WARN, stats.subject, message, where, float(stats.attempts), 0.0, "steps", later)
    elif len(scales) < 2:
        message = f"scaler.update() must follow the steps; it was not called in {stats.attempts:,} of them"
        yield Finding(
            check, Verdict.WARN, stats.subject, message, hint="call scaler.update() once after all optimizers"
        )
    elif (often := _too_often(stats)) is not None:
        share, usual = often
        message = (
            f"once a scale is found, a step is skipped when it has grown too far, one in "
            f"{scaler.growth_interval + 1:,}; {share:.0%} were ({story}){named}"
        )
        yield Finding(check, Verdict.WARN, stats.subject, message, where, share, usual, "of the steps", hint)
    else:
        yield passed(check, stats.subject, story, stats.attempts)


def _story(stats: WatchStats) -> str:
    assert stats.scaler is not None
    scales = stats.scaler.scales
    if not scales:
        return f"{stats.skipped:,} of {stats.attempts:,} steps skipped"
    grown = sum(b > a for a, b in pairwise(scales))
    backed = sum(b < a for a, b in pairwise(scales))
    return (
        f"scale {scales[0]:g} to {scales[-1]:g}, between {min(scales):g} and {max(scales):g}; {grown:,}x grown, "
        f"{backed:,}x backed off, {stats.skipped:,} of {stats.attempts:,} steps skipped"
    )


def _trailing(one: WatchedOptimizer) -> int:
    """How many skipped steps stand at the end."""
    skipped, count = set(one.skipped), 0
    while count < one.attempts and one.attempts - 1 - count in skipped:
        count += 1
    return count


def _too_often(stats: WatchStats) -> tuple[float, float] | None:
    """The share of steps that was skipped after the first that was made, and the usual one; None if it is usual."""
    assert stats.scaler is not None
    usual = 1 / (stats.scaler.growth_interval + 1)
    for one in stats.optimizers:
        skipped = set(one.skipped)
        begun = next((number for number in range(one.attempts) if number not in skipped), one.attempts)
        after, late = one.attempts - begun, sum(number > begun for number in skipped)
        # A scale may still be too high at the start by a few binades, which gradients that grow go through at once.
        if late > _LASTING and late / after > max(0.1, 4 * usual):
            return late / after, usual
    return None


def _stagnation(stats: WatchStats, limits: Limits) -> Iterator[Finding]:
    check = "stagnation"
    narrow = [one for one in stats.parameters if one.update is not None and one.update.due]
    if not narrow:
        return
    risen = {one.name for one in stats.optimizers if one.rates and one.rates[-1] > one.rates[0] * (1 + 1e-6)}
    nearest = {one.name for one in stats.optimizers if one.nearest}
    found = []
    for one in narrow:
        update = one.update
        assert update is not None
        share = update.unchanged / update.due
        if share <= limits.stagnation or (one.still is not None and one.still <= limits.stagnation):
            continue
        if _taken_up(one, update) or _as_stochastic(update):
            continue
        known = one.optimizer in nearest
        lost = known or _lost(update)
        lasting = update.calls >= _SEVERAL and update.due >= _MANY and one.optimizer not in risen
        message = (
            f"at most {limits.stagnation:.0%} of updates may change nothing; of {one.name} ({one.dtype}) {share:.0%} "
            f"of those with a gradient did not in {update.calls:,} measured steps"
        )
        if one.still is not None:
            message += f", and {one.still:.0%} of its elements are what they were at the first"
        if one.optimizer in risen:
            message += " (the learning rate still rises)"
        if not known:
            message += (
                f"; of a sample stochastic rounding would have moved about {update.expected:.3g} in these steps, and "
                f"{update.moved:,} moved" + ("" if lost else ", which does not tell how this optimizer rounds")
            )
        hint = (
            "keep the weights in float32 and let autocast compute in 16 bits, or keep float32 master weights; "
            "otherwise stochastic rounding, Kahan summation or a larger learning rate"
        )
        verdict = Verdict.FAIL if lasting and lost else Verdict.WARN
        where = _where(one, "update")
        found.append(
            Finding(check, verdict, stats.subject, message, where, share, limits.stagnation, "of the updates", hint)
        )
    text, seen = f"the updates of {len(narrow)} parameters change them", sum(u.calls for o in narrow if (u := o.update))
    yield from _most(stats, found) or [passed(check, stats.subject, text, seen)]


def _lost(update: UpdateSum) -> bool:
    """Whether elements that stochastic rounding would move stay where they are."""
    return update.expected >= _TOLD and _FEWER * update.moved < update.expected


def _as_stochastic(update: UpdateSum) -> bool:
    """Whether elements that rounding to nearest leaves move as often as stochastic rounding moves them."""
    return update.expected >= _MANY / 2 and update.expected / 2 <= update.moved <= 4 * update.expected


def _taken_up(one: WatchedParameter, update: UpdateSum) -> bool:
    """Whether something beside the parameter keeps what it drops. It would come back by now if it did so for long."""
    return bool(one.exempt) and not (_lost(update) and update.expected >= 2 * sampled(one.numel))


def _coverage(stats: WatchStats) -> Finding:
    check, told = "coverage", f"{stats.coverage} were looked at in training"
    if unseen := "; ".join(f"{what} ({count}x)" for what, count in stats.coverage.unseen.items()):
        told += f"; not looked at: {unseen}"
    if not stats.measured:
        return _skipped(stats, check, _unmeasured(stats))
    if not any(one.gradient for one in stats.parameters):
        message = (
            f"a gradient must have been measured; in {stats.measured:,} measured steps no parameter had one: {told}"
        )
        hint = "call backward() before the step, on a loss of the parameters that this optimizer has"
        return Finding(check, Verdict.FAIL, stats.subject, message, hint=hint)
    return passed(check, stats.subject, told, stats.coverage.total)


def _unmeasured(stats: WatchStats) -> str:
    if not stats.measured:
        return f"none of the {stats.steps + stats.skipped:,} steps was measured: {stats.skipped:,} were skipped"
    return f"no gradient was there in {stats.measured:,} measured steps"


def _where(one: WatchedParameter, phase: str, step: int | None = None) -> Where:
    return Where(phase, module=one.name.rpartition(".")[0], step=step)


def _skipped(stats: WatchStats, check: str, text: str) -> Finding:
    return Finding(check, Verdict.SKIP, stats.subject, text)


def _most(stats: WatchStats, found: Iterable[Finding]) -> list[Finding]:
    """The worst few; what they leave out is counted in the last."""
    ordered = sorted(found, key=lambda one: (one.verdict is not Verdict.FAIL, -(one.observed or 0.0)))
    shown = ordered[:_LISTED]
    if rest := len(ordered) - len(shown):
        last = shown[0]
        text = f"{last.message}; {rest:,} more parameters beside the {len(shown)} named ones"
        shown[0] = Finding(
            last.check, last.verdict, stats.subject, text, last.where, last.observed, last.limit, last.unit, last.hint
        )
    return shown
