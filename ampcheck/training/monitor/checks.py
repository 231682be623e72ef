"""Checks on a monitored training loop. Pure functions from `MonitorStats` to findings."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from ampcheck.catalog.numerics import COVERAGE, NONFINITE_GRADIENT, OVERFLOW
from ampcheck.catalog.training import GRADIENT_UNDERFLOW, LOSS_SCALE, SCALER_PROTOCOL, SCHEDULER_SKIP, STAGNATION
from ampcheck.core.check import Evidence
from ampcheck.core.environment import environment
from ampcheck.core.formats import FORMATS
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Run, Verdict, Where
from ampcheck.training.gradients.checks import larger_scale_hint
from ampcheck.training.loss_scale_window import is_usable
from ampcheck.training.monitor.sums import MonitorStats, ParameterStats, UpdateSum
from ampcheck.training.monitor.updates import sampled
from ampcheck.training.monitor.views import monitor_charts, monitor_tables, window_of
from ampcheck.training.protocol.checks import check_protocol, check_scheduler_skip
from ampcheck.training.protocol.events import Act
from ampcheck.training.scale.checks import INIT_SCALE_HINT, unusable_scale
from ampcheck.training.scale.stats import is_settled
from ampcheck.training.stagnation.stagnation import WARNED_FROM, lost_updates

MONITORED = tuple(
    str(check)
    for check in (
        *(OVERFLOW, NONFINITE_GRADIENT, GRADIENT_UNDERFLOW, LOSS_SCALE, STAGNATION),
        *(SCALER_PROTOCOL, SCHEDULER_SKIP, COVERAGE),
    )
)
"""What is judged of a monitored loop."""

_LISTED = 5
"""Parameters that a check names before it only counts them."""

_SEVERAL = 3
"""Steps from which on what is true of each is a property of the loop."""

_MANY = 32
"""Updates from which on a share of them is a property of a parameter."""

_SIGNIFICANT = 64.0
"""Moves that stochastic rounding would have made, from which on it is significant that there were hardly any."""

_FEWER = 16
"""How many times fewer they are then: the size of a step is known to a small factor."""

_NOISE = 8.0
"""Unit roundoffs of the loudest gradient of its module that may be left of a sum that is zero."""

_LASTING = 10
"""Skipped steps in a row that are no search for a scale any more: 2**10 is most of where GradScaler starts."""


def monitor_run(limits: Limits, device: str, stats: MonitorStats) -> Run:
    """The findings of a monitored loop with their evidence."""
    evidence = monitor_tables(stats, limits), monitor_charts(stats, limits)
    return Run(environment(device), tuple(check_monitored(stats, limits)), stats.coverage, *evidence)


def check_monitored(stats: MonitorStats, limits: Limits) -> list[Finding]:
    """The findings of `MONITORED`, in this order.

    There is no reference: a defect that only a comparison could prove is a warning.
    """
    if not stats.steps and not stats.attempts:
        message = "an optimizer step must have run in the block; none did, so nothing was looked at"
        hint = (
            "call optimizer.step() or scaler.step(optimizer) inside the block, on the optimizer that is watched; "
            "a step inside torch.compile is not seen"
        )
        return [*_calls(stats, limits), COVERAGE.fail(stats.subject, message, hint=hint)]
    return [
        *_losses(stats),
        *_nonfinite_gradient(stats),
        *_underflow(stats, limits),
        *_loss_scale(stats, limits),
        *_stagnation(stats, limits),
        *_calls(stats, limits),
        _coverage(stats),
    ]


def _losses(stats: MonitorStats) -> Iterator[Finding]:
    count = len(stats.losses)
    if not count:
        return
    bad = sum(not math.isfinite(loss) for loss in stats.losses)
    if not math.isfinite(stats.losses[-1]):
        first = next((step + 1 for step in reversed(range(count)) if math.isfinite(stats.losses[step])), 0)
        message = f"the loss must be finite; it is {stats.losses[-1]} in the last of {count} steps"
        hint = "ampcheck.audit names the op where the first infinity or NaN appears"
        yield OVERFLOW.fail(stats.subject, message, **_evidence(Where("forward", step=first), bad, 0, "steps", hint))
        return
    before = f", after {bad} that were not" if bad else ""
    yield OVERFLOW.passed(stats.subject, f"the last of {count} losses is finite{before}", count)


def _nonfinite_gradient(stats: MonitorStats) -> list[Finding]:
    guarded = {optimizer.name for optimizer in stats.optimizers if optimizer.guarded}
    findings = []
    for param, gradient in stats.gradients:
        health, update = gradient.health, param.update
        if update is not None and update.poisoned:
            message = (
                f"weights must stay finite; {param.name} held an infinity or NaN after {update.poisoned:,} of "
                f"{update.calls:,} measured steps"
            )
            hint = "step through torch.amp.GradScaler, which leaves out a step with such gradients; see overflow"
            where = _where(param, "update", gradient.first if gradient.bad else None)
            evidence = _evidence(where, update.poisoned, 0, "steps", hint)
            findings.append(NONFINITE_GRADIENT.fail(stats.subject, message, **evidence))
        elif gradient.bad and param.optimizer not in guarded:
            message = (
                f"a step must be made with finite gradients; that of {param.name} was not in {gradient.bad:,} of "
                f"{gradient.calls:,} measured steps ({health.infs:,} infinities, {health.nans:,} NaN), and the "
                "optimizer was stepped; its weights stayed finite"
            )
            hint = "leave such a step out (torch.amp.GradScaler does), or mend what overflows in forward"
            evidence = _evidence(_where(param, "backward", gradient.first), gradient.bad, 0, "steps", hint)
            findings.append(NONFINITE_GRADIENT.warn(stats.subject, message, **evidence))
    if not stats.gradients:
        return [NONFINITE_GRADIENT.skip(stats.subject, _unmeasured(stats))]
    skipped = f"; {stats.skipped:,} more were left out by the scaler" if stats.skipped else ""
    text = f"{stats.measured:,} measured steps were made with finite gradients{skipped}"
    seen = sum(gradient.calls for _, gradient in stats.gradients)
    return _worst(findings) or [NONFINITE_GRADIENT.passed(stats.subject, text, seen)]


def _underflow(stats: MonitorStats, limits: Limits) -> list[Finding]:
    """Only warnings: without a reference, an element that was flushed looks like one that is zero."""
    nothing = all(gradient.vanished == gradient.calls for _, gradient in stats.gradients)
    judged = [
        (param, gradient)
        for param, gradient in stats.gradients
        if stats.is_scaled or nothing or gradient.health.dtype == "float16" or gradient.cut
    ]
    if not judged:
        return []
    hint = f"{larger_scale_hint(2.0 if stats.is_scaled else 1.0)}; ampcheck.audit compares with a float32 backward"
    findings = []
    for param, gradient in judged:
        health, calls = gradient.health, gradient.calls
        zeros = health.zeros / health.finite if health.nonzero else 0.0
        if calls >= _SEVERAL and gradient.vanished == calls:
            zeros = 1.0
            message = (
                f"gradients must not vanish; that of {param.name} was zero altogether in each of {calls:,} measured "
                "steps (float16 flushes what is too small, or nothing depends on it)"
            )
        elif zeros > limits.underflow and 2 * gradient.cut > calls:
            message = (
                f"at most {limits.underflow:.0%} of a gradient may become zero; of {param.name} {zeros:.0%} is zero, "
                f"and the rest ends abruptly at the smallest number of float16 in {gradient.cut:,} of {calls:,} "
                "measured steps: what is smaller was flushed"
            )
        else:
            continue
        where = _called(stats, param, Act.BACKWARD)
        evidence = _evidence(where, zeros, limits.underflow, GRADIENT_UNDERFLOW.unit, hint)
        findings.append(GRADIENT_UNDERFLOW.warn(stats.subject, message, **evidence))
    text = f"none of {len(judged)} gradients shows the marks of flushing (no proof: nothing was compared)"
    seen = sum(gradient.calls for _, gradient in judged)
    return _worst(findings) or [GRADIENT_UNDERFLOW.passed(stats.subject, text, seen)]


def _loss_scale(stats: MonitorStats, limits: Limits) -> list[Finding]:
    scaler, subject = stats.scaler, stats.subject
    if scaler is None:
        return []
    if not scaler.enabled:
        return [LOSS_SCALE.skip(subject, "the scaler is switched off (enabled=False)")]
    if not stats.attempts:
        return [LOSS_SCALE.skip(subject, "no optimizer was stepped through the scaler")]
    scales, last = scaler.scales, scaler.scales[-1] if scaler.scales else math.nan
    worst = max(stats.optimizers, key=lambda optimizer: optimizer.skipped_last)
    trailing, where = worst.skipped_last, Where("update", step=worst.skipped[-1] if worst.skipped else None)
    names = ", ".join(f"{name} ({count:,}x)" for name, count in list(scaler.culprits.items())[:_LISTED])
    history = _history(stats)
    known = f"({history})" + (f"; not finite were the gradients of {names}" if names else "")
    hint = (
        "a scale that falls without end means that a gradient is infinite or NaN at any scale: mend the overflow, or "
        "leave batches with NaN out; see nonfinite-gradient"
    )
    unusable = next((number for number, scale in enumerate(scales) if not is_usable(scale)), None)
    if unusable is not None:
        since = f"{f'after {unusable:,} updates' if unusable else 'from the first step on'} {known}"
        where = Where("update", step=unusable)
        return [unusable_scale(subject, scales[unusable], since, where, hint if unusable else INIT_SCALE_HINT)]
    if scales and last < 1 <= scales[0]:
        settled = is_settled(window_of(stats, limits), last, trailing > 0)
        message = f"the loss scale must stay at 1 or above; it fell to {last:g} {known}"
        hint = "its gradients are that large: average the loss instead of summing it" if settled else hint
        build = LOSS_SCALE.warn if settled else LOSS_SCALE.fail
        return [build(subject, message, **_evidence(where, last, 1, "loss scale", hint))]
    if trailing >= _LASTING and trailing < worst.attempts:
        message = f"a scaler that backs off must find a scale; the last {trailing:,} steps were skipped {known}"
        return [LOSS_SCALE.fail(subject, message, **_evidence(where, trailing, _LASTING, "steps", hint))]
    if not stats.steps:
        message = f"steps must be made; all {stats.attempts:,} were skipped so far {known}"
        hint = "start lower (init_scale) or run longer: GradScaler halves the scale until the gradients are finite"
        return [LOSS_SCALE.warn(subject, message, **_evidence(where, stats.attempts, 0, "steps", hint))]
    if len(scales) < 2:
        message = f"scaler.update() must follow the steps; it was not called in {stats.attempts:,} of them"
        verdict = Verdict.WARN if stats.calls is None else Verdict.SKIP  # `scaler-protocol` names the call
        return [LOSS_SCALE.finding(verdict, subject, message, hint="call scaler.update() once after all optimizers")]
    if (often := _skipped_too_often(stats)) is not None:
        share, usual = often
        message = (
            f"once a scale is found, a step is skipped when it has grown too far, one in "
            f"{scaler.growth_interval + 1:,}; {share:.0%} were {known}"
        )
        return [LOSS_SCALE.warn(subject, message, **_evidence(where, share, usual, "of the steps", hint))]
    return [LOSS_SCALE.passed(subject, history, stats.attempts)]


def _history(stats: MonitorStats) -> str:
    scales = stats.scaler.scales if stats.scaler else ()
    skipped = f"{stats.skipped:,} of {stats.attempts:,} steps skipped"
    if not scales:
        return skipped
    grown = sum(b > a for a, b in pairwise(scales))
    backed = sum(b < a for a, b in pairwise(scales))
    return (
        f"scale {scales[0]:g} to {scales[-1]:g}, between {min(scales):g} and {max(scales):g}; {grown:,}x grown, "
        f"{backed:,}x backed off, {skipped}"
    )


def _skipped_too_often(stats: MonitorStats) -> tuple[float, float] | None:
    """The share of steps that was skipped after the first that was made, and the usual one; None if it is usual."""
    assert stats.scaler is not None
    usual = 1 / (stats.scaler.growth_interval + 1)
    for optimizer in stats.optimizers:
        skipped = set(optimizer.skipped)
        first_made = next((number for number in range(optimizer.attempts) if number not in skipped), optimizer.attempts)
        after, late = optimizer.attempts - first_made, sum(number > first_made for number in skipped)
        # A scale may still be too high at the start by a few binades, which gradients that grow go through at once.
        if late > _LASTING and late / after > max(0.1, 4 * usual):
            return late / after, usual
    return None


def _stagnation(stats: MonitorStats, limits: Limits) -> list[Finding]:
    loudest: dict[str, float] = defaultdict(float)
    for param, gradient in stats.gradients:
        loudest[_module(param)] = max(loudest[_module(param)], gradient.health.amax)
    narrow = [
        (param, update)
        for param in stats.parameters
        if (update := param.update) is not None and update.due and not _is_noise(param, loudest[_module(param)])
    ]
    if not narrow:
        return []
    rising = {o.name for o in stats.optimizers if o.rates and o.rates[-1] > o.rates[0] * (1 + 1e-6)}
    nearest = {optimizer.name for optimizer in stats.optimizers if optimizer.nearest}
    hint = (
        "keep the weights in float32 and let autocast compute in 16 bits, or keep float32 master weights; "
        "otherwise stochastic rounding, Kahan summation or a larger learning rate"
    )
    findings = []
    for param, update in narrow:
        share = update.unchanged / update.due
        least = share if param.still is None else min(share, param.still)
        # Only of an optimizer that rounds to nearest a part that is lost proves anything.
        limit = min(WARNED_FROM, limits.stagnation) if param.optimizer in nearest else limits.stagnation
        if least <= limit:
            continue
        limit = limits.stagnation if least > limits.stagnation else limit
        if _is_compensated(param, update) or _is_stochastic(update):
            continue
        lost = param.optimizer in nearest or _is_lost(update)
        message = lost_updates(param.name, param.dtype, share, limit, update.calls)
        if param.still is not None:
            message += f", and {param.still:.0%} of its elements are what they were at the first"
        if param.optimizer in rising:
            message += " (the learning rate still rises)"
        if param.optimizer not in nearest:
            message += (
                f"; of a sample stochastic rounding would have moved about {update.expected:.3g} in these steps, and "
                f"{update.moved:,} moved" + ("" if lost else ", which does not tell how this optimizer rounds")
            )
        lasting = update.calls >= _SEVERAL and update.due >= _MANY and param.optimizer not in rising
        build = STAGNATION.fail if lasting and lost and limit == limits.stagnation else STAGNATION.warn
        where = _called(stats, param, Act.OPTIMIZER_STEP)
        evidence = _evidence(where, share, limit, "of the updates", hint)
        findings.append(build(stats.subject, message, **evidence))
    text = f"the updates of {len(narrow)} parameters change them"
    return _worst(findings) or [STAGNATION.passed(stats.subject, text, sum(update.calls for _, update in narrow))]


def _is_lost(update: UpdateSum) -> bool:
    """Whether elements that stochastic rounding would move keep their values."""
    return update.expected >= _SIGNIFICANT and _FEWER * update.moved < update.expected


def _is_stochastic(update: UpdateSum) -> bool:
    """Whether elements that rounding to nearest leaves move as often as stochastic rounding moves them."""
    return update.expected >= _MANY / 2 and update.expected / 2 <= update.moved <= 4 * update.expected


def _module(param: ParameterStats) -> str:
    """The module of a parameter; its own name where it has no module, or no model was handed over to name it."""
    unnamed = param.name.startswith(f"{param.optimizer}.params.")
    return ("" if unnamed else param.name.rpartition(".")[0]) or param.name


def _is_noise(param: ParameterStats, loudest: float) -> bool:
    """Whether the gradient of a vector may be rounding errors alone: that of a bias before a batch norm is zero by
    mathematics, which a loop without a reference cannot show. loudest: of the gradients of its module."""
    limit = _NOISE * FORMATS[param.dtype].unit_roundoff * loudest
    return param.vector and param.gradient is not None and param.gradient.health.amax <= limit


def _is_compensated(param: ParameterStats, update: UpdateSum) -> bool:
    """Whether the optimizer keeps what the parameter drops. It would have arrived by now if it did so for long."""
    return param.compensated and not (_is_lost(update) and update.expected >= 2 * sampled(param.numel))


def _calls(stats: MonitorStats, limits: Limits) -> list[Finding]:
    """The order of calls in the first steps; without a scaler or a scheduler there may be nothing to judge."""
    if stats.calls is None:
        return []
    findings = [*check_protocol(stats.calls, limits), *check_scheduler_skip(stats.calls)]
    return [finding for finding in findings if finding.verdict is not Verdict.SKIP]


def _coverage(stats: MonitorStats) -> Finding:
    text = f"{stats.coverage} were looked at in training"
    if unseen := "; ".join(f"{what} ({count}x)" for what, count in stats.coverage.unseen.items()):
        text += f"; not looked at: {unseen}"
    if not stats.measured:
        return COVERAGE.skip(stats.subject, _unmeasured(stats))
    if not stats.gradients:
        message = (
            f"a gradient must have been measured; in {stats.measured:,} measured steps no parameter had one: {text}"
        )
        hint = "call backward() before the step, on a loss of the parameters that this optimizer has"
        return COVERAGE.fail(stats.subject, message, hint=hint)
    return COVERAGE.passed(stats.subject, text, stats.coverage.total)


def _unmeasured(stats: MonitorStats) -> str:
    if not stats.measured:
        steps = stats.steps + stats.skipped
        return f"none of {steps:,} steps was measured; the scaler skipped {stats.skipped:,}"
    return f"no gradient was there in {stats.measured:,} measured steps"


def _where(param: ParameterStats, phase: str, step: int | None = None) -> Where:
    return Where(phase, module=param.name.rpartition(".")[0], step=step)


def _called(stats: MonitorStats, param: ParameterStats, act: Act) -> Where:
    """The line from which a backward pass reached a parameter, or its optimizer was stepped."""
    where = _where(param, "backward" if act is Act.BACKWARD else "update")
    for event in stats.calls.events if stats.calls is not None else ():
        if event.act is act and param.optimizer in (event.who, *event.optimizers):
            return replace(where, file=event.file, line=event.line)
    return where


def _evidence(where: Where, observed: float, limit: float, unit: str, hint: str) -> Evidence:
    return {"where": where, "observed": observed, "limit": limit, "unit": unit, "hint": hint}


def _worst(findings: list[Finding]) -> list[Finding]:
    """The first few, failures and large observations first; the message of the first counts those left out."""
    ordered = sorted(findings, key=lambda f: (f.verdict is not Verdict.FAIL, -(f.observed or 0.0)))
    if rest := len(ordered[_LISTED:]):
        text = f"{ordered[0].message}; {rest:,} more parameters beside the {_LISTED} named ones"
        ordered[0] = replace(ordered[0], message=text)
    return ordered[:_LISTED]
