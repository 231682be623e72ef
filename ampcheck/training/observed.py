"""A loop as it runs by itself: what its steps did, and what did not go as a step must."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from ampcheck.core.run import Chart, Finding, Series, Verdict, Where, passed
from ampcheck.training.gradients.capture import plain_values
from ampcheck.training.gradients.underflow import quiet
from ampcheck.training.loop import Role, StepError, TrainingLoop
from ampcheck.training.protocol.events import Act, Event
from ampcheck.training.protocol.recorder import Recorder
from ampcheck.training.stagnation.measure import Restarts
from ampcheck.training.state_dtypes.measure import StateDtypeStats, measure_state_dtypes

_LISTED = 3

_OF_GRADIENTS = ("gradient-underflow", "loss-scale", "loss-dtype")
"""Checks that say nothing without a backward pass."""

_OF_UPDATES = ("nonfinite-gradient", "stagnation", "resume")
"""Checks that say nothing where no weight changes."""

_BACKWARD = (
    "let step(i) run loss.backward(), or observe as many steps as it takes to come to it ('steps' in the mapping)"
)
_OPTIMIZER = "let the mapping name the optimizer that steps these weights, and the model that it was built for"
_SKIPPED = "gradients were infinite or NaN in every step: see loss-scale for the scales that serve, and the first op"
_UNUSED = (
    "write scaler.scale(loss).backward(), scaler.step(optimizer) and scaler.update(), or leave the scaler out: "
    "bfloat16 and float32 need none"
)


@dataclass(slots=True)
class Observed:
    """What a loop did when it ran as it is.

    losses: what its steps returned. replaced: parameters that the optimizer steps and that are no longer those of the
    model. restarted: 16-bit tensors that became smaller now and then. changed: whether any weight changed. moved:
    whether a tensor narrower than float32 was given an update. narrow: whether backward ran in 16 bits; None where
    compiled code hides it. disabled: scalers that do nothing; unused: those that are enabled and that no step asks for
    anything. empty: whether there is nothing that a step could change.
    """

    subject: str
    steps: int = 0
    losses: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    stopped: StepError | None = None
    residency: StateDtypeStats | None = None
    replaced: tuple[str, ...] = ()
    restarted: frozenset[str] = frozenset()
    changed: bool = True
    moved: bool = False
    narrow: bool | None = None
    disabled: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    empty: bool = False

    @property
    def settled(self) -> int:
        """The first step in which every optimizer step was taken; 0 where there is none."""
        skipped = {event.step for event in self.events if event.act is Act.SCALER_STEP and event.skipped}
        passes = {event.step for event in self.events if event.act is Act.BACKWARD}
        return next((number for number in sorted(passes) if number not in skipped), 0)

    @property
    def all_skipped(self) -> bool:
        """Whether scalers skipped every optimizer step."""
        skips = [event.skipped for event in self.events if event.act is Act.SCALER_STEP]
        direct = any(event.act is Act.OPTIMIZER_STEP and not event.through_scaler for event in self.events)
        return bool(skips) and all(skips) and not direct

    @property
    def learned(self) -> bool:
        """Whether a backward pass ran."""
        return any(event.act is Act.BACKWARD for event in self.events)


def observe(loop: TrainingLoop, steps: int, *, restarts: bool = True) -> Observed:
    """Run the first steps as they are, and listen. restarts: look for 16-bit sums that start anew."""
    seen = Observed(loop.name, empty=loop.empty)
    before = _owned(loop)
    sums = _sums(loop)
    lived = measure_state_dtypes(loop, after_step=False)
    recorder, anew = Recorder(loop), Restarts()
    with quiet(), recorder.listening():
        for recorder.step in range(steps):
            taken = loop.take(recorder.step)
            recorder.forget_graphs()
            if isinstance(taken, StepError):
                seen.stopped = taken
                break
            seen.steps += 1
            seen.losses.append(taken)
            if restarts:
                anew.look(loop)
    seen.events = recorder.events
    seen.restarted = frozenset(anew.names)
    seen.replaced = _replaced(loop, before)
    seen.residency = measure_state_dtypes(loop, after_step=seen.steps > 0, before=lived)
    stepped = any(event.act is Act.OPTIMIZER_STEP and event.gradients for event in seen.events)
    stepped = stepped and not seen.all_skipped  # a fused optimizer is called all the same, and skips in its kernel
    seen.changed = stepped or bool(seen.replaced) or _sums(loop) != sums
    stored = any(one.is_floating_point() and one.dtype.itemsize <= 2 for _, one in loop.parameters())
    low = stored or any(event.low or event.dtype in ("float16", "bfloat16") for event in seen.events)
    seen.narrow = True if low else None if loop.reached.compiled else False
    seen.disabled = tuple(path for path, scaler in loop.reached.scalers.items() if not scaler.is_enabled())
    if not recorder.scaled:
        seen.unused = tuple(path for path in loop.reached.scalers if path not in seen.disabled)
    return seen


def _sums(loop: TrainingLoop) -> dict[str, str]:
    """The sum of each trained tensor in float64, as text, in which NaN equals NaN; writes through `.data` show.

    Copies count too: master weights take up an update that their 16-bit twins cannot hold yet.
    """
    trained = (Role.PARAMETER, Role.COPY)
    weights = {one.name: one.tensor for one in loop.residents() if one.role in trained or one.tensor.requires_grad}
    return {
        name: repr(float(plain_values(one).sum(dtype=torch.float64)))
        for name, one in weights.items()
        if one.is_floating_point() and one.device.type != "meta"
    }


def unjudged(findings: Iterable[Finding], seen: Observed) -> list[Finding]:
    """The findings, those incomplete that rest on something that the steps never did: a backward pass, an update, a use
    of the scaler. What fails or warns stays."""

    def reason(finding: Finding) -> tuple[str, str]:
        check, idle = finding.check, finding.verdict is Verdict.PASS
        if finding.verdict not in (Verdict.PASS, Verdict.SKIP) or not seen.steps:
            return "", ""
        if not seen.learned and check in _OF_GRADIENTS:
            return f"no backward pass ran in {seen.steps} steps", _BACKWARD
        if (
            not seen.changed
            and not (check == "stagnation" and seen.moved)
            and (check in _OF_UPDATES and (idle or check != "resume"))
        ):
            why = "the scaler skipped every optimizer step, and " if seen.all_skipped else ""
            return f"{why}no weight changed in {seen.steps} steps", _SKIPPED if seen.all_skipped else _OPTIMIZER
        if seen.unused and check == "scaler-protocol":
            why = f"{', '.join(seen.unused)} is enabled, and no step of {seen.steps} uses it: losses are not scaled"
            return why, _UNUSED
        return "", ""

    judged = [(finding, *reason(finding)) for finding in findings]
    return [
        replace(f, verdict=Verdict.INCOMPLETE, message=f"not judged: {why}", hint=hint, seen=0) if why else f
        for f, why, hint in judged
    ]


def _replaced(loop: TrainingLoop, before: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """What an optimizer still steps though no module holds it any more."""
    held = {id(one) for module in loop.reached.modules.values() for one in module.parameters()}
    groups = (group for optimizer in loop.optimizers.values() for group in optimizer.param_groups)
    stepped = {id(one) for group in groups for one in group["params"]}
    return tuple(name for name, one in before.items() if id(one) in stepped - held)


def _owned(loop: TrainingLoop) -> dict[str, torch.Tensor]:
    """The parameters of the modules."""
    held = {id(one) for module in loop.reached.modules.values() for one in module.parameters()}
    return {name: one for name, one in loop.parameters() if id(one) in held}


def loss_chart(seen: Observed) -> tuple[Chart, ...]:
    """What the steps returned, where two or more of them are finite."""
    finite = [(float(number), loss) for number, loss in enumerate(seen.losses) if math.isfinite(loss)]
    if len(finite) < 2:
        return ()
    series = Series(seen.subject, tuple(number for number, _ in finite), tuple(loss for _, loss in finite))
    return (Chart("line", "what the steps returned", "step", "loss", (series,), check="coverage"),)


def check_observed(seen: Observed) -> list[Finding]:
    """`coverage`: the steps came to their end, returned a loss, changed weights, and did something in 16 bits."""
    if seen.empty:
        message = "a training loop needs a module, an optimizer or a tensor that lives across steps; found none"
        hint = "name them: {'model': model, 'optimizer': optimizer, 'scaler': scaler, 'step': step}"
        return [Finding("coverage", Verdict.FAIL, seen.subject, message, hint=hint)]
    found = [] if seen.stopped is None else [_stopped(seen, seen.stopped)]
    if seen.replaced:
        many = f" and {len(seen.replaced) - _LISTED} more" if len(seen.replaced) > _LISTED else ""
        message = (
            "the parameters of a model must stay the same objects, or its optimizer steps others; replaced were "
            f"{', '.join(seen.replaced[:_LISTED])}{many}"
        )
        hint = "write into parameters (parameter.data.copy_), or build the optimizer anew"
        found.append(Finding("coverage", Verdict.FAIL, seen.subject, message, hint=hint))
    if not seen.steps:
        return found
    if not seen.learned:
        text = f"no backward pass ran in {seen.steps} steps: nothing was learned from gradients, and none judged"
        found.append(Finding("coverage", Verdict.WARN, seen.subject, text))
    elif not seen.changed:
        text = f"{seen.steps} steps ran backward, and no optimizer stepped a gradient and no weight changed"
        hint = _OPTIMIZER
        if seen.all_skipped:
            text = f"{seen.steps} steps ran backward, and the scaler skipped every optimizer step: no weight changed"
            hint = _SKIPPED
        found.append(Finding("coverage", Verdict.WARN, seen.subject, text, hint=hint))
    if seen.learned and seen.narrow is False and seen.disabled:
        found.append(_idle(seen))
    if not found:
        text = f"{seen.steps} steps ran, with {len(seen.events)} backward passes, steps and other events"
        found.append(passed("coverage", seen.subject, text, seen.steps))
    return found


def _stopped(seen: Observed, stopped: StepError) -> Finding:
    what = {
        "raised": "a step must come to its end",
        "memory": "a step must fit into memory",
        "value": "a step must return its loss, a float (or a tensor of one element)",
    }[stopped.kind]
    hint = {
        "raised": "run the step by itself; what comes after the exception was not looked at",
        "memory": "use a smaller batch, model or data set for the audit: it keeps a copy of all that the step reaches "
        "(weights, state, gradients, data), and one more of what training changes",
        "value": "return loss.item()",
    }[stopped.kind]
    if stopped.message.startswith("StopIteration"):
        hint = "it draws on an iterator that ends: let step(i) depend on i alone, or observe fewer steps (--steps)"
    where = Where(file=stopped.file, line=stopped.line, step=stopped.step)
    message = f"{what}; step {stopped.step}: {stopped.message}"
    return Finding("coverage", Verdict.FAIL, seen.subject, message, where, hint=hint)


def _idle(seen: Observed) -> Finding:
    """PyTorch switches autocast and scalers off, with a warning only, for a device that is not there."""
    text = f"backward ran in float32 alone, and {', '.join(seen.disabled)} is disabled: low precision was not judged"
    hint = (
        "where this machine lacks the device, autocast and GradScaler do nothing: choose both by the device that is "
        "there, torch.autocast('cpu', dtype) and torch.amp.GradScaler('cpu')"
    )
    return Finding("coverage", Verdict.WARN, seen.subject, text, hint=hint)
