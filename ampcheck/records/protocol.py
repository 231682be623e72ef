"""Calls of a training loop to its scaler, optimizers, clipping and schedulers, and the steps that raised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ampcheck.core.run import Where


class Act(str, Enum):
    """Kind of a recorded call.

    SCALE `scaler.scale(loss)`; BACKWARD a backward pass; GRAD `torch.autograd.grad`; CLIP gradients were clipped;
    UNSCALE the user's own `scaler.unscale_`; SCALER_STEP `scaler.step`; UPDATE `scaler.update`; OPTIMIZER_STEP the step
    of the optimizer itself; SCHEDULER_STEP; SAVE a scaler's state; LOAD a scaler's or an optimizer's; CHECKPOINT
    `torch.save`.
    """

    SCALE = "scale"
    BACKWARD = "backward"
    GRAD = "grad"
    CLIP = "clip"
    UNSCALE = "unscale"
    SCALER_STEP = "scaler step"
    UPDATE = "update"
    OPTIMIZER_STEP = "optimizer step"
    SCHEDULER_STEP = "scheduler step"
    SAVE = "save"
    LOAD = "load"
    CHECKPOINT = "checkpoint"


OF_STEPS = (Act.OPTIMIZER_STEP, Act.SCALER_STEP)


@dataclass(frozen=True, slots=True)
class Event:
    """One call, in the order in which they were made.

    step: the number of the loop's step. who: path of the scaler, optimizer or scheduler; of SAVE and LOAD whose state,
    of BACKWARD and GRAD the scaler that scaled the loss. scale: the loss scale in use, of BACKWARD and GRAD the one of
    that loss, of UPDATE the one before it, of CLIP the last one that the loop has read by `get_scale`, None for none;
    new_scale: of UPDATE the one after it. limit: of CLIP, the norm or value that gradients are clipped to.
    scaled: of BACKWARD and GRAD, whether the loss came through `scaler.scale`; None where that is not known, as of
    gradients that the step passes on itself. dtype: of the loss, where there is one. enabled: of a scaler.
    optimizers: whose gradients a BACKWARD added to or a CLIP clipped; of SCHEDULER_STEP the one it belongs to; of LOAD
    the one whose state was loaded.
    computed: of BACKWARD, the 16-bit dtypes in which the loss or a part of it was computed, whatever it was cast to.
    factor: of BACKWARD, the number by which the loss was multiplied last, such as a constant loss scale.
    cleared: of BACKWARD, the optimizers that had no gradient, or zeros only, when it began; of UNSCALE, those whose
    gradients the code itself assigned since the last step.
    through_scaler: of OPTIMIZER_STEP, whether `scaler.step` called it; closure: whether it computes its own gradients.
    gradients: of OPTIMIZER_STEP, whether a parameter has a gradient when it begins.
    skipped: of SCALER_STEP, whether the optimizer was not stepped.
    nonfinite: of SCALER_STEP, and of an OPTIMIZER_STEP that was called directly while a scaler is in use, parameters
    with an infinite or NaN gradient.
    create_graph: of GRAD and BACKWARD. low: of BACKWARD, the 16-bit dtypes in which autocast ran since the last one.
    begins: of SCHEDULER_STEP, whether it is the first one of a new schedule.
    half: of UNSCALE, SCALER_STEP and OPTIMIZER_STEP, trained parameters in float16.
    keys: of CHECKPOINT, what it contains: `optimizer`, `scaler`.
    """

    act: Act
    step: int
    who: str = ""
    scale: float | None = None
    new_scale: float | None = None
    limit: float | None = None
    scaled: bool | None = None
    dtype: str = ""
    enabled: bool = True
    optimizers: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()
    through_scaler: bool = False
    closure: bool = False
    skipped: bool = False
    nonfinite: tuple[str, ...] = ()
    create_graph: bool = False
    low: tuple[str, ...] = ()
    half: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    factor: float = 1.0
    gradients: bool = False
    begins: bool = False
    file: str = ""
    line: int | None = None

    @property
    def where(self) -> Where:
        """The line of the call."""
        phase = "backward" if self.act in (Act.BACKWARD, Act.GRAD) else "update"
        return Where(phase, file=self.file, line=self.line, step=self.step)


def injected_text(step: int) -> str:
    """Return how a finding names the run in which the gradient of a step was made infinite."""
    return f"(in a run of its own, in which the gradient of step {step} was made infinite)"


@dataclass(frozen=True, slots=True)
class StepError:
    """A step that did not come to its end. `kind`: `raised`, `memory` (out of memory) or `value` (no float).

    The exception itself is not stored: its traceback keeps every local of the step alive, tensors and graphs included.
    rank: of the process, where it is another one. op: the method of a GradScaler that raised.
    """

    step: int
    kind: str
    message: str
    file: str = ""
    line: int | None = None
    rank: int | None = None
    op: str = ""


@dataclass(frozen=True, slots=True)
class ProtocolStats:
    """The events of the observed steps, and what other measurements say about their gradients.

    lost: the largest share of a tensor's nonzero gradient that became zero, None where it was not measured.
    stopped: the step that raised. invariant: whether gradients were equal at every loss scale, None where that was not
    judged: gradients that were clipped or added unscaled do no harm then.
    injected: the step whose gradient was made infinite for a trial. applied: parameters to which the optimizer then, or
    in the observed steps, applied an infinite or NaN gradient; None where no gradient was one.
    damage: what the loss scale in use does to the gradients of all parameters together.
    format: the 16-bit format in which gradients flow, "" where none does or none was measured.
    scalers: the enabled ones that the loop can reach.
    """

    subject: str
    events: tuple[Event, ...]
    steps: int
    lost: float | None = None
    stopped: StepError | None = None
    invariant: bool | None = None
    injected: int | None = None
    applied: tuple[str, ...] | None = None
    damage: str = ""
    format: str = ""
    scalers: tuple[str, ...] = ()

    @property
    def in_trial(self) -> str:
        """The clause that names the trial, if there was one."""
        return "" if self.injected is None else f" {injected_text(self.injected)}"


def same_loss(first: float, second: float) -> bool:
    """Return whether two runs of one step returned the same value, NaN for NaN."""
    return first == second or (math.isnan(first) and math.isnan(second))


def without_gradients(events: Sequence[Event]) -> Event | None:
    """The first step of an optimizer, if no step of any had a gradient."""
    steps = [event for event in events if event.act is Act.OPTIMIZER_STEP]
    return steps[0] if len(steps) > 1 and not any(event.gradients for event in steps) else None


def all_skipped(events: Sequence[Event]) -> bool:
    """Return whether scalers skipped every step, and no optimizer was stepped directly."""
    steps = [event for event in events if event.act in OF_STEPS]
    skips = [event.skipped for event in steps if event.act is Act.SCALER_STEP]
    direct = any(event.act is Act.OPTIMIZER_STEP and not event.through_scaler for event in steps)
    return bool(skips) and all(skips) and not direct


def steps_past_scaler(events: Sequence[Event]) -> bool:
    """Return whether a loss was scaled, and an optimizer was stepped directly that never steps through a scaler."""
    scaled = any(e.act in (Act.SCALE, Act.UNSCALE) and e.enabled for e in events)
    through = {name for e in events if e.act is Act.SCALER_STEP and e.enabled for name in e.optimizers}
    direct = (e for e in events if e.act is Act.OPTIMIZER_STEP and not e.through_scaler)
    return scaled and any(e.who not in through for e in direct)


def applied_nonfinite(events: Sequence[Event]) -> tuple[str, ...]:
    """Parameters to which an optimizer that was stepped directly applied an infinite or NaN gradient."""
    direct = [e for e in events if e.act is Act.OPTIMIZER_STEP and not e.through_scaler]
    return tuple(dict.fromkeys(name for event in direct for name in event.nonfinite))
