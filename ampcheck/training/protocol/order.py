"""Are scaler, optimizers, clipping and schedulers used in the order that they need? Pure: judged from events.

The order is that of PyTorch's automatic mixed precision examples: scale, backward (as often as gradients accumulate),
unscale_ once if gradients are looked at or changed, step each optimizer, update once, clear the gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where, passed
from ampcheck.training.loop import same_loss
from ampcheck.training.protocol.events import Act, Event
from ampcheck.training.protocol.missing import check_missing_scaler
from ampcheck.training.protocol.stats import ProtocolStats as ProtocolStats

_LISTED = 5
_SCALED_BY_HAND = ("clip", "unscaled loss")
"""Rules that a step keeps in its own way, if gradients come out equal at every scale: a bound times the scale, a loss
multiplied by `get_scale()`, a gradient that is handed on."""
_RAISED = {
    "Attempting to unscale FP16 gradients": "half",
    "unscale_() has already been called": "unscaled twice",
    "unscale_() is being called after step()": "unscaled after the step",
    "step() has already been called since the last update()": "no update",
    "No inf checks were recorded": "nothing to update",
    "_scale is None": "never scaled",
    "Closure use is not currently supported": "closure",
    "Closure use is not currently supported if GradScaler is enabled": "closure",
}
"""What GradScaler refuses, by the words of its errors."""


def check_protocol(stats: ProtocolStats, limits: Limits) -> list[Finding]:
    """`scaler-protocol`: the calls come in the order that gradients of a known scale need."""
    slug = "scaler-protocol"
    breaches = [*_Gradients(stats.events).breaches()]
    if stats.stopped is not None:
        reached = stats.stopped.step
        if not any(event.act is Act.SCALER_STEP and event.step < reached for event in stats.events):
            breaches = [one for one in breaches if one.rule != "no update"]  # the exception kept it from being called
        breaches += _from_error(stats)
    if stats.invariant:
        breaches = [breach for breach in breaches if breach.rule not in _SCALED_BY_HAND]
    found = [_finding(slug, stats, breach) for breach in _worst(breaches)]
    scalers = {e.who for e in stats.events if e.act in (Act.SCALE, Act.SCALER_STEP, Act.UPDATE) and e.enabled}
    found += check_missing_scaler(stats, limits)
    if found:
        return found
    if not scalers:
        return [Finding(slug, Verdict.SKIP, stats.subject, f"no GradScaler was in use in {stats.steps} steps")]
    counts = {act: sum(e.act is act for e in stats.events) for act in (Act.BACKWARD, Act.SCALER_STEP, Act.UPDATE)}
    if not counts[Act.SCALER_STEP]:
        text = f"a GradScaler scaled losses, but no optimizer was stepped through it in {stats.steps} steps"
        return [Finding(slug, Verdict.SKIP, stats.subject, text)]
    told = ", ".join(f"{count} {act.value}{'s' if count != 1 else ''}" for act, count in counts.items())
    return [passed(slug, stats.subject, f"{told} came in the order that they need", sum(counts.values()))]


def check_scheduler_skip(stats: ProtocolStats) -> list[Finding]:
    """`scheduler-skip`: a scheduler does not go on where the scaler skipped the optimizer's step."""
    slug = "scheduler-skip"
    steps = [e for e in stats.events if e.act is Act.SCHEDULER_STEP]
    skips = [e for e in stats.events if e.act is Act.SCALER_STEP and e.skipped]
    if not steps:
        return [Finding(slug, Verdict.SKIP, stats.subject, "no scheduler stepped")]
    if not skips:
        return [Finding(slug, Verdict.SKIP, stats.subject, "no optimizer step was skipped")]
    since: dict[str, list[Event]] = {}
    wrong: list[tuple[Event, Event]] = []
    for event in stats.events:
        if event.act is Act.SCALER_STEP:
            for schedulers in {e.who for e in steps if e.optimizers == event.optimizers}:
                since.setdefault(schedulers, []).append(event)
        elif event.act is Act.SCHEDULER_STEP:
            before = since.pop(event.who, [])
            if before and all(one.skipped for one in before):
                wrong.append((event, before[-1]))
    if not wrong:
        text = f"{len(skips)} optimizer steps were skipped, and no scheduler went on for one of them"
        return [passed(slug, stats.subject, text, len(skips))]
    done = sum(e.act is Act.SCALER_STEP and not e.skipped for e in stats.events)
    first, skipped = wrong[0]
    message = (
        f"a scheduler must step with the optimizer; {first.who} stepped {len(wrong)} times after scaler.step had "
        f"skipped {skipped.optimizers[0]}: {done} updates but {len(steps)} scheduler steps"
    )
    if stats.injected is not None:
        message += f" (in a run of its own, in which the gradient of step {stats.injected} was made infinite)"
    hint = (
        "compare the scale around scaler.update() and step the scheduler only where it did not fall: "
        "before = scaler.get_scale(); scaler.update(); if scaler.get_scale() >= before: scheduler.step()"
    )
    return [
        Finding(slug, Verdict.FAIL, stats.subject, message, _where(first), float(len(wrong)), 0.0, "steps", hint=hint)
    ]


@dataclass(frozen=True, slots=True)
class _Breach:
    rule: str
    message: str
    event: Event
    hint: str


@dataclass(slots=True)
class _Held:
    """What is in the gradients of one optimizer: the scales that were in use, whether they were divided out again.

    epochs: of each scale, its scaler and how often that was updated before.
    """

    scales: list[float] = field(default_factory=list)
    epochs: list[tuple[str, int]] = field(default_factory=list)
    plain: list[Event] = field(default_factory=list)
    unscaled: bool = False
    by_user: bool = False
    stepped: bool = False
    mixed: tuple[Event, float, bool] | None = None


class _Gradients:
    """Follow what is in each optimizer's gradients from event to event."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        self._held: dict[str, _Held] = {}
        self._scale: float | None = None
        self._scaler = ""
        self._epochs: Counter[str] = Counter()
        self._scalers = any(e.enabled and e.act in (Act.UNSCALE, Act.SCALER_STEP) for e in events)

    def breaches(self) -> Iterator[_Breach]:
        updates = 0
        last: Event | None = None
        for event in self._events:
            if not event.enabled:
                continue
            if event.act is Act.SCALE:
                self._scale, self._scaler = event.scale, event.who
            elif event.act is Act.BACKWARD:
                self._backward(event)
            elif event.act is Act.CLIP:
                yield from self._clip(event)
            elif event.act is Act.UNSCALE:
                yield from self._unscale(event)
            elif event.act is Act.SCALER_STEP:
                yield from self._scaler_step(event)
                last = event
            elif event.act is Act.OPTIMIZER_STEP and not event.through_scaler:
                yield from self._direct(event)
            elif event.act is Act.UPDATE:
                updates += 1
                self._epochs[event.who] += 1
        if last is not None and not updates:
            message = "scaler.update() must follow the optimizers' steps, once in each step; it was never called"
            yield _Breach("no update", message, last, "call scaler.update() after the last scaler.step() of a step")

    def _of(self, name: str) -> _Held:
        return self._held.setdefault(name, _Held())

    def _backward(self, event: Event) -> None:
        for name in event.cleared:
            self._held[name] = _Held()
        for name in event.optimizers:
            held = self._of(name)
            scale = self._scale if event.scale is None else event.scale
            if event.scaled and held.unscaled and held.mixed is None:
                held.mixed = event, scale or 1.0, held.stepped
            if event.scaled and scale is not None:
                held.scales.append(scale)
                who = event.who or self._scaler
                held.epochs.append((who, self._epochs[who]))
            elif event.scaled is False:
                held.plain.append(event)

    def _mixed(self, name: str) -> Iterator[_Breach]:
        """Gradients of two scales matter once they are used; a GAN leaves such behind, and clears them."""
        held = self._of(name)
        if held.mixed is not None:
            event, scale, stepped = held.mixed
            when = "stepped with and not cleared" if stepped else "unscaled already"
            message = (
                f"gradients that accumulate must have one scale; those of {name} were {when} when a backward pass "
                f"of a loss scaled by {scale:g} added to them"
            )
            hint = "call optimizer.zero_grad() after the step; call unscale_ once, after the last micro-batch"
            yield _Breach("mixed", message, event, hint)

    def _clip(self, event: Event) -> Iterator[_Breach]:
        for name in event.optimizers:
            held = self._of(name)
            yield from self._mixed(name)
            if held.scales and not held.unscaled:
                message = (
                    f"gradients must be unscaled before they are clipped; those of {name} still were "
                    f"{held.scales[-1]:g} times too large"
                )
                hint = "call scaler.unscale_(optimizer) before torch.nn.utils.clip_grad_norm_"
                yield _Breach("clip", message, event, hint)

    def _unscale(self, event: Event) -> Iterator[_Breach]:
        (name,) = event.optimizers
        held = self._of(name)
        yield from self._mixed(name)
        if held.unscaled and held.mixed is None:
            message = (
                f"gradients must be unscaled once; those of {name} were divided by the scale {event.scale:g} again"
                + ("" if held.stepped else " before the step")
            )
            hint = "call unscale_ once in each optimizer step, after the last micro-batch, and update after the step"
            yield _Breach("unscaled twice", message, event, hint)
        elif held.mixed is None:
            yield from self._use(name, event)
        yield from _half(event)
        held.unscaled = held.by_user = True

    def _scaler_step(self, event: Event) -> Iterator[_Breach]:
        (name,) = event.optimizers
        held = self._of(name)
        yield from self._mixed(name)
        if held.mixed is None and (not held.unscaled or held.stepped):
            yield from self._use(name, event)
        yield from _half(event)
        held.unscaled = held.stepped = True

    def _use(self, name: str, event: Event) -> Iterator[_Breach]:
        """The scaler is about to divide gradients by its scale: did all of them get it?"""
        held = self._of(name)
        wrong = [scale for scale in held.scales if event.scale is None or not same_loss(scale, event.scale)]
        if wrong:
            several = len(set(held.scales)) > 1
            message = (
                f"gradients must be divided by the scale that the loss had; those of {name} were scaled by "
                f"{' and '.join(f'{s:g}' for s in dict.fromkeys(held.scales))} and are divided by {event.scale:g}, "
                f"since scaler.update() came {'while they accumulated' if several else 'in between'}"
            )
        elif others := [who for who, _ in held.epochs if who != event.who]:
            message = (
                f"gradients must be unscaled by the scaler that scaled their loss; those of {name} were scaled by "
                f"{others[0]} and are unscaled by {event.who}. Their scales are equal this time; at the first overflow "
                "they part"
            )
        elif any(self._epochs[who] != epoch for who, epoch in held.epochs):
            message = (
                f"scaler.update() must not come between a backward pass and the step of its optimizer; it came before "
                f"the step of {name}. The scale stayed as it was this time; when it grows, these gradients are divided "
                "by another scale than their own"
            )
        elif held.plain:
            message = (
                f"a loss must be scaled before backward if its gradients are unscaled; a backward pass of an unscaled "
                f"loss added to {name}, whose gradients are divided by {event.scale:g}"
            )
            hint = "call backward on scaler.scale(loss), for every loss of the step"
            yield _Breach("unscaled loss", message, held.plain[0], hint)
            return
        else:
            return
        hint = "call scaler.update() once, after the steps of all optimizers, and never while gradients accumulate"
        yield _Breach("update between", message, event, hint)

    def _direct(self, event: Event) -> Iterator[_Breach]:
        held = self._of(event.who)
        if not self._scalers and not held.scales:
            return
        if held.scales and not held.stepped:
            state = (
                "unscaled, but that the scaler did not look at for infinities"
                if held.unscaled
                else f"{held.scales[-1]:g} times too large"
            )
            message = (
                f"an optimizer whose loss was scaled must step through the scaler; {event.who}.step() was called "
                f"directly, on gradients that are {state}"
            )
            rule = "guarded step" if held.unscaled else "direct step"
            yield _Breach(rule, message, event, "call scaler.step(optimizer) instead of optimizer.step()")
        held.stepped = True


def _half(event: Event) -> Iterator[_Breach]:
    if names := event.half.get("float16", ()):
        many = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        message = (
            f"a GradScaler needs float32 parameters (it cannot unscale float16 gradients); {len(names)} of "
            f"{event.optimizers[0]} are float16: {', '.join(names[:_LISTED])}{many}"
        )
        hint = (
            "keep the model in float32 (no .half()) and let torch.autocast cast; or train in bfloat16 without a scaler"
        )
        yield _Breach("half", message, event, hint)


def _from_error(stats: ProtocolStats) -> Iterator[_Breach]:
    """What GradScaler itself refused with an exception."""
    if stats.stopped is None or stats.stopped.kind != "raised":
        return
    for words, rule in _RAISED.items():
        if words in stats.stopped.message:
            event = Event(Act.SCALER_STEP, stats.stopped.step, file=stats.stopped.file, line=stats.stopped.line)
            message = f"GradScaler refused a call that came out of order: {stats.stopped.message}"
            hint = "scale, backward, unscale_ once if gradients are clipped, step each optimizer, update once"
            yield _Breach(rule, message, event, hint)


def _worst(breaches: Sequence[_Breach]) -> list[_Breach]:
    """One of each rule, the first; what GradScaler refused only where no rule of ours says why."""
    first: dict[str, _Breach] = {}
    for breach in breaches:
        first.setdefault(breach.rule, breach)
    return list(first.values())


def _finding(slug: str, stats: ProtocolStats, breach: _Breach) -> Finding:
    verdict, message = Verdict.FAIL, breach.message
    by_hand = breach.rule == "direct step" and stats.invariant
    if by_hand:
        message = f"{message.partition(', on gradients')[0]}, on gradients that it divides by the scale itself"
    if breach.rule == "guarded step" or by_hand:
        if stats.applied:
            many = f" and {len(stats.applied) - _LISTED} more" if len(stats.applied) > _LISTED else ""
            message += f"; it applied infinite or NaN gradients to {', '.join(stats.applied[:_LISTED])}{many}"
            if stats.injected is not None:
                message += f" (in a run of its own, in which the gradient of step {stats.injected} was made infinite)"
        elif stats.invariant:  # the step may look for infinities itself, which no event tells
            verdict = Verdict.WARN
    return Finding(slug, verdict, stats.subject, message, _where(breach.event), hint=breach.hint)


def steps_past_scaler(events: Sequence[Event]) -> bool:
    """Whether a loss was scaled, and an optimizer was stepped directly that never steps through a scaler."""
    scaled = any(e.act in (Act.SCALE, Act.UNSCALE) and e.enabled for e in events)
    through = {name for e in events if e.act is Act.SCALER_STEP and e.enabled for name in e.optimizers}
    direct = (e for e in events if e.act is Act.OPTIMIZER_STEP and not e.through_scaler)
    return scaled and any(e.who not in through for e in direct)


def applied_nonfinite(events: Sequence[Event]) -> tuple[str, ...]:
    """Parameters to which an optimizer that was stepped directly applied an infinite or NaN gradient."""
    direct = [e for e in events if e.act is Act.OPTIMIZER_STEP and not e.through_scaler]
    return tuple(dict.fromkeys(name for event in direct for name in event.nonfinite))


def _where(event: Event) -> Where:
    phase = "backward" if event.act in (Act.BACKWARD, Act.GRAD) else "update"
    return Where(phase, file=event.file, line=event.line, step=event.step)
