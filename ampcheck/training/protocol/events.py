"""What a training loop does with its scaler, optimizers, clipping and schedulers, event by event."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Act(str, Enum):
    """What happened.

    SCALE `scaler.scale(loss)`; BACKWARD a backward pass; GRAD `torch.autograd.grad`; CLIP gradients were clipped;
    UNSCALE the user's own `scaler.unscale_`; SCALER_STEP `scaler.step`; UPDATE `scaler.update`; OPTIMIZER_STEP the step
    of the optimizer itself; SCHEDULER_STEP; SAVE and LOAD of a state (`who` says whose); CHECKPOINT `torch.save`.
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


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. Plain data, in the order in which it happened.

    step: the number of the loop's step. who: path of the scaler, optimizer or scheduler; of SAVE and LOAD whose state,
    of BACKWARD and GRAD the scaler that scaled the loss. scale: the loss scale in use, of BACKWARD and GRAD the one of
    that loss, of UPDATE the one before it; new_scale: of UPDATE the one after it.
    scaled: of BACKWARD and GRAD, whether the loss came through `scaler.scale`; None where that cannot be told, as of
    gradients that the step hands on itself. dtype: of the loss, where there is one. enabled: of a scaler.
    optimizers: whose gradients a BACKWARD added to or a CLIP clipped; of SCHEDULER_STEP the one it belongs to.
    computed: of BACKWARD, the 16-bit dtypes in which the loss or a part of it was computed, whatever it was cast to.
    cleared: of BACKWARD, the optimizers that had no gradient, or zeros only, when it began.
    through_scaler: of OPTIMIZER_STEP, whether `scaler.step` called it.
    gradients: of OPTIMIZER_STEP, whether a parameter has a gradient when it begins.
    skipped: of SCALER_STEP, whether the optimizer was not stepped.
    nonfinite: of SCALER_STEP, and of an OPTIMIZER_STEP that was called directly while a scaler is in use, parameters
    with an infinite or NaN gradient.
    create_graph: of GRAD and BACKWARD. low: of BACKWARD, the 16-bit dtypes in which autocast ran since the last one.
    half: of UNSCALE, SCALER_STEP and OPTIMIZER_STEP, parameters of 16 bits, by dtype.
    keys: of CHECKPOINT, what it holds: `optimizer`, `scaler`.
    """

    act: Act
    step: int
    who: str = ""
    scale: float | None = None
    new_scale: float | None = None
    scaled: bool | None = None
    dtype: str = ""
    enabled: bool = True
    optimizers: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()
    through_scaler: bool = False
    skipped: bool = False
    nonfinite: tuple[str, ...] = ()
    create_graph: bool = False
    low: tuple[str, ...] = ()
    half: dict[str, tuple[str, ...]] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    gradients: bool = False
    file: str = ""
    line: int | None = None
