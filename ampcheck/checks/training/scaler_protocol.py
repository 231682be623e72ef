"""Requires: Scaler, optimizers and clipping are called in an order that keeps the scale of the gradients well defined:
scale, backward, unscale_ once if gradients are read, step of each optimizer through the scaler, one update, gradients
cleared. Fails for a clip before unscale_, unscale_ twice or for each micro-batch, an update that is missing or between
two optimizers, an optimizer stepped directly, a loss that was not scaled, a loss scale or a skipped step by which ranks
part, gradients that no step clears, float16 parameters under a scaler, and float16 gradients without a loss scale where
they vanish. Warns for float16 autocast or float16 parameters without a scaler where nothing vanished yet, also where a
scaler is enabled and no step uses it. In bfloat16 and float32 no scaler is needed.

Measured: The methods of torch.amp.GradScaler, optimizer steps, clipping and backward passes are recorded while the
steps run; the state of each optimizer's gradients (scaled by which scale, divided out or not) is followed from call to
call. Gradients that are cleared before they are used do not count. Where an optimizer is stepped directly, one gradient
is made infinite in a run of its own.

Causes: Gradient clipping added later, gradient accumulation, several losses or optimizers, model.half().

Fix: Follow the order above, see PyTorch's Automatic Mixed Precision examples; call update once in each step.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ampcheck.checks.training import parted
from ampcheck.checks.training._order import limits_follow, never_cleared
from ampcheck.core.check import Check, Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import Kind
from ampcheck.core.text import listed
from ampcheck.records.protocol import Act, Event, ProtocolStats, StepError, same_loss
from ampcheck.records.reductions import ReplicaStats

CHECK = Check(
    "scaler-protocol",
    "training",
    __doc__,
    subjects=(Kind.TRAINING, Kind.CALL),
    needs=("ProtocolStats", "ReplicaStats"),
    order=602,
    evidence=("tests/corpus/training/optimizer_stepped_past_the_scaler", "nanogpt: a loss that is not scaled"),
)

_USES = (Act.SCALE, Act.UNSCALE, Act.SCALER_STEP, Act.UPDATE)
_LOSS_SCALE = 64.0
"""The least constant factor of a loss that counts as a loss scale: weights of losses are smaller."""
_SCALED_BY_HAND = ("clip", "unscaled loss")
"""Rules that a step follows in its own way, if gradients are equal at every scale: a bound times the scale, a loss
multiplied by `get_scale()`, a gradient that is passed on."""
_RAISED = MappingProxyType(
    {
        "Attempting to unscale FP16 gradients": "half",
        "unscale_() has already been called": "unscaled twice",
        "unscale_() is being called after step()": "unscaled after the step",
        "step() has already been called since the last update()": "no update",
        "No inf checks were recorded": "nothing to update",
        "_scale is None": "never scaled",
        "Closure use is not currently supported": "closure",
    }
)
"""The calls that GradScaler refuses, by the words of its errors."""
_STEP_THROUGH = "call scaler.step(optimizer) instead of optimizer.step()"
_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "no update": "call scaler.update() after the last scaler.step() of a step",
        "mixed": "call optimizer.zero_grad() after the step; call unscale_ once, after the last micro-batch",
        "not cleared": "call optimizer.zero_grad() in each step, before the first backward pass",
        "clip": "call scaler.unscale_(optimizer) before torch.nn.utils.clip_grad_norm_",
        "unscaled twice": (
            "call unscale_ once in each optimizer step, after the last micro-batch, and update after the step"
        ),
        "unscaled loss": "call backward on scaler.scale(loss), for every loss of the step",
        "update between": (
            "call scaler.update() once, after the steps of all optimizers, and never while gradients accumulate"
        ),
        "guarded step": _STEP_THROUGH,
        "direct step": _STEP_THROUGH,
        "half": (
            "keep the model in float32 (no .half()) and let torch.autocast cast; or train in bfloat16 without a scaler"
        ),
    }
)


def check(stats: ProtocolStats | ReplicaStats, limits: Limits) -> list[Finding]:
    """The calls come in the order that gradients of a known scale need, and ranks agree on the scale."""
    if isinstance(stats, ProtocolStats):
        return _of_calls(stats, limits)
    return [CHECK.fail(stats.subject, stats.message, **parted(stats))] if stats.drift.scaler else []


def _of_calls(stats: ProtocolStats, limits: Limits) -> list[Finding]:
    order = _Order(stats.events)
    breaches = list(order.breaches())
    if order.limits_follow():
        breaches = [breach for breach in breaches if breach.rule != "clip"]
    if not any(breach.rule == "mixed" for breach in breaches):
        breaches += [_Breach("not cleared", event, message) for event, message in never_cleared(stats.events)]
    if stats.stopped is not None:
        reached = stats.stopped.step
        if not any(event.act is Act.SCALER_STEP and event.step < reached for event in stats.events):
            # The exception kept it from being called.
            breaches = [breach for breach in breaches if breach.rule != "no update"]
        if not any(breach.event.step <= reached for breach in breaches):  # else the exception follows from it
            breaches += _refused(stats.stopped)
    if stats.invariant:
        breaches = [breach for breach in breaches if breach.rule not in _SCALED_BY_HAND]
    first = {breach.rule: breach for breach in reversed(breaches)}
    findings = [_finding(stats, first[rule]) for rule in dict.fromkeys(breach.rule for breach in breaches)]
    findings += _missing_scaler(stats, limits)
    if findings:
        return findings
    if not any(e.act in (Act.SCALE, Act.SCALER_STEP, Act.UPDATE) and e.enabled for e in stats.events):
        return [CHECK.absent(stats.subject, f"no GradScaler was in use in {stats.steps} steps")]
    acts = [event.act for event in stats.events]
    counts = {act: acts.count(act) for act in (Act.BACKWARD, Act.SCALER_STEP, Act.UPDATE)}
    if not counts[Act.SCALER_STEP]:
        text = f"a GradScaler scaled losses, but no optimizer was stepped through it in {stats.steps} steps"
        return [CHECK.skip(stats.subject, text)]
    calls = ", ".join(f"{count} {act.value}{'s' if count != 1 else ''}" for act, count in counts.items())
    text = f"{calls} came in the order that they need"
    return [CHECK.passed(stats.subject, text, sum(counts.values()))]


def _missing_scaler(stats: ProtocolStats, limits: Limits) -> list[Finding]:
    """float16 gradients need a loss scale. Fails where they vanish without it, and warns elsewhere.

    They are float16 under autocast to float16, with float16 parameters, and where a measured gradient flows in float16.
    A loop that never calls `scaler.scale` but uses the scaler otherwise, or multiplies its losses by a constant, scales
    them by hand: it is not judged if no gradient vanished.
    """
    passes = [event for event in stats.events if event.act is Act.BACKWARD]
    autocast = [event for event in passes if "float16" in event.low]
    uses = {event.act for event in stats.events if event.enabled and event.act in _USES}
    steps_half = any(e.act is Act.OPTIMIZER_STEP and e.gradients and e.half for e in stats.events)
    narrow = autocast or (passes if stats.format == "float16" or steps_half else [])
    if not narrow or Act.SCALE in uses or (uses and (stats.lost == 0.0 or not autocast)):
        return []
    if not stats.lost and not stats.damage and all(event.factor >= _LOSS_SCALE for event in narrow):
        return []
    message = "float16 autocast needs a GradScaler" if autocast else "gradients in float16 need a loss scale"
    message += f"; {len(narrow)} backward passes ran on losses that no GradScaler scaled"
    if stats.lost:
        message += f": up to {100 * stats.lost:.3g}% of a tensor's gradient became zero"
    elif stats.lost is not None:
        message += ": no gradient vanished in the measured step, but later ones may"
    message += stats.damage
    hint = "use torch.amp.GradScaler (scale, step, update), or autocast to bfloat16"
    if stats.scalers and not uses:
        message += f"; {', '.join(stats.scalers)} is enabled, and no step of {stats.steps} uses it"
        hint = (
            "write scaler.scale(loss).backward(), scaler.step(optimizer) and scaler.update(), or autocast to bfloat16"
        )
    if not autocast:
        hint = (
            "keep the parameters in float32, run forward under torch.autocast and use torch.amp.GradScaler; or use "
            "bfloat16"
        )
    vanished = bool(stats.damage) or (stats.lost is not None and stats.lost > limits.underflow)
    shown = Evidence(where=narrow[0].where, hint=hint)
    if stats.lost is not None:
        shown = Evidence(**shown, observed=stats.lost, limit=limits.underflow, unit="share of the gradient")
    return [CHECK.finding(Verdict.FAIL if vanished else Verdict.WARN, stats.subject, message, **shown)]


@dataclass(frozen=True, slots=True)
class _Breach:
    rule: str
    event: Event
    message: str
    hint: str = ""


@dataclass(slots=True)
class _Gradients:
    """The accumulated gradients of one optimizer.

    scales: of their losses. epochs: of each scale, its scaler and how often that was updated before. unscaled_losses:
    backward passes of losses without a scale. unscaled: the call that divided the scales out last. mixed: a backward
    pass that added scaled gradients to unscaled ones.
    """

    scales: list[float] = field(default_factory=list)
    epochs: list[tuple[str, int]] = field(default_factory=list)
    unscaled_losses: list[Event] = field(default_factory=list)
    unscaled: Event | None = None
    stepped: bool = False
    mixed: _Breach | None = None


class _Order:
    """The state of each optimizer's gradients from event to event."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = [event for event in events if event.enabled]
        self._gradients: dict[str, _Gradients] = defaultdict(_Gradients)
        self._scale: float | None = None
        self._scaler = ""
        self._epochs: Counter[str] = Counter()
        self._scalers = any(e.act in (Act.UNSCALE, Act.SCALER_STEP) for e in self._events)
        self._clips: dict[tuple[str, str, int | None], list[tuple[Event, float]]] = defaultdict(list)

    def limits_follow(self) -> bool:
        """Return whether all clips of scaled gradients did no harm."""
        return all(map(limits_follow, self._clips.values()))

    def breaches(self) -> Iterator[_Breach]:
        last: Event | None = None
        for event in self._events:
            match event.act:
                case Act.SCALE:
                    self._scale, self._scaler = event.scale, event.who
                case Act.BACKWARD:
                    self._backward(event)
                case Act.CLIP:
                    yield from self._clip(event)
                case Act.UNSCALE | Act.SCALER_STEP:
                    yield from self._unscale(event)
                    last = event if event.act is Act.SCALER_STEP else last
                case Act.OPTIMIZER_STEP if not event.through_scaler and not event.closure:
                    yield from self._direct(event)
                case Act.UPDATE:
                    self._epochs[event.who] += 1
        if last is not None and not self._epochs:
            message = "scaler.update() must follow the optimizers' steps, once in each step; it was never called"
            yield _Breach("no update", last, message)

    def _backward(self, event: Event) -> None:
        for name in event.cleared:
            self._gradients[name] = _Gradients()
        scale, who = self._scale if event.scale is None else event.scale, event.who or self._scaler
        for name in event.optimizers:
            own = self._gradients[name]
            if event.scaled and own.unscaled and own.mixed is None:
                message = (
                    f"gradients that accumulate must have one scale; those of {name} were "
                    f"{'stepped with and not cleared' if own.stepped else 'unscaled already'} when a backward pass "
                    f"of a loss scaled by {scale or 1.0:g} added to them"
                )
                own.mixed = _Breach("mixed", event if own.stepped else own.unscaled, message)
            if event.scaled and scale is not None:
                own.scales.append(scale)
                own.epochs.append((who, self._epochs[who]))
            elif event.scaled is False:
                own.unscaled_losses.append(event)

    def _used(self, name: str) -> Iterator[_Breach]:
        """Gradients of two scales matter once they are used; a GAN leaves such behind, and clears them."""
        if (mixed := self._gradients[name].mixed) is not None:
            yield mixed

    def _clip(self, event: Event) -> Iterator[_Breach]:
        for name in event.optimizers:
            own = self._gradients[name]
            yield from self._used(name)
            if own.scales and not own.unscaled and event.limit != math.inf:  # which measures the norm alone
                self._clips[name, event.file, event.line].append((event, own.scales[-1]))
                message = (
                    f"gradients must be unscaled before they are clipped; those of {name} still were "
                    f"{own.scales[-1]:g} times too large"
                )
                yield _Breach("clip", event, message)

    def _unscale(self, event: Event) -> Iterator[_Breach]:
        """The user's own `unscale_`, or that of `scaler.step`, which leaves out what is unscaled already."""
        (name,) = event.optimizers
        own, steps = self._gradients[name], event.act is Act.SCALER_STEP
        if event.cleared and own.stepped and own.mixed is None and not own.unscaled_losses:
            own = self._gradients[name] = _Gradients()
        yield from self._used(name)
        if own.mixed is None and own.unscaled and not steps:
            message = (
                f"gradients must be unscaled once; those of {name} were divided by the scale {event.scale:g} again"
                + ("" if own.stepped else " before the step")
            )
            yield _Breach("unscaled twice", event, message)
        elif own.mixed is None and (not own.unscaled or own.stepped):
            yield from self._divide(name, event)
        if event.half:
            message = (
                f"a GradScaler needs float32 parameters (it cannot unscale float16 gradients); {len(event.half)} of "
                f"{name} are float16: {listed(event.half)}"
            )
            yield _Breach("half", event, message)
        own.unscaled, own.stepped = event, own.stepped or steps

    def _divide(self, name: str, event: Event) -> Iterator[_Breach]:
        """The scaler is about to divide gradients by its scale: were the losses of all of them multiplied by it?"""
        own = self._gradients[name]
        others = [who for who, _ in own.epochs if who != event.who]
        differ = any(event.scale is None or not same_loss(scale, event.scale) for scale in own.scales)
        scales = f"{' and '.join(f'{s:g}' for s in dict.fromkeys(own.scales))} and are divided by {event.scale:g}"
        if others:
            equal = "Their scales are equal this time; at the first overflow they part"
            message = (
                f"gradients must be unscaled by the scaler that scaled their loss; those of {name} were scaled by "
                f"{listed(dict.fromkeys(who for who, _ in own.epochs))} and are unscaled by {event.who}. "
                f"{f'They were scaled by {scales}' if differ else equal}"
            )
        elif differ:
            message = (
                f"gradients must be divided by the scale that the loss had; those of {name} were scaled by {scales}, "
                "since scaler.update() came "
                f"{'while they accumulated' if len(set(own.scales)) > 1 else 'in between'}"
            )
        elif any(self._epochs[who] != epoch for who, epoch in own.epochs):
            message = (
                f"scaler.update() must not come between a backward pass and the step of its optimizer; it came before "
                f"the step of {name}. The scale did not change this time; when it grows, these gradients are divided "
                "by another scale than their own"
            )
        elif own.unscaled_losses:
            message = (
                f"a loss must be scaled before backward if its gradients are unscaled; a backward pass of an unscaled "
                f"loss added to {name}, whose gradients are divided by {event.scale:g}"
            )
            yield from (_Breach("unscaled loss", loss, message) for loss in own.unscaled_losses)
            return
        else:
            return
        yield _Breach("update between", event, message)

    def _direct(self, event: Event) -> Iterator[_Breach]:
        own = self._gradients[event.who]
        if own.scales and not own.stepped:
            state = (
                "unscaled, but that the scaler did not look at for infinities"
                if own.unscaled
                else f"{own.scales[-1]:g} times too large"
            )
            message = (
                f"an optimizer whose loss was scaled must step through the scaler; {event.who}.step() was called "
                f"directly, on gradients that are {state}"
            )
            yield _Breach("guarded step" if own.unscaled else "direct step", event, message)
        if self._scalers or own.scales:
            own.stepped = True


def _refused(stopped: StepError) -> Iterator[_Breach]:
    """Yield what GradScaler itself refused with an exception."""
    for words, rule in _RAISED.items():
        if stopped.kind == "raised" and words in stopped.message:
            event = Event(Act.SCALER_STEP, stopped.step, file=stopped.file, line=stopped.line)
            message = f"GradScaler refused a call that came out of order: {stopped.message}"
            hint = "scale, backward, unscale_ once if gradients are clipped, step each optimizer, update once"
            yield _Breach(rule, event, message, hint)


def _finding(stats: ProtocolStats, breach: _Breach) -> Finding:
    verdict, message = Verdict.FAIL, breach.message
    by_hand = breach.rule == "direct step" and stats.invariant
    if by_hand:
        message = f"{message.partition(', on gradients')[0]}, on gradients that it divides by the scale itself"
    if breach.rule == "guarded step" or by_hand:
        if stats.applied:
            message += f"; it applied infinite or NaN gradients to {listed(stats.applied)}{stats.in_trial}"
        elif stats.invariant:  # the step may look for infinities itself, which no event shows
            verdict = Verdict.WARN
    hint = breach.hint or _HINTS[breach.rule]
    shown = Evidence(where=breach.event.where, hint=hint, kind=breach.rule)
    return CHECK.finding(verdict, stats.subject, message, **shown)
