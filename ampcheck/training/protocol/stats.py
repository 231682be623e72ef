"""What a loop did with its scaler and optimizers, as plain data for the checks of their order."""

from __future__ import annotations

from dataclasses import dataclass

from ampcheck.training.loop import StepError
from ampcheck.training.protocol.events import Event


@dataclass(frozen=True, slots=True)
class ProtocolStats:
    """What a loop did in the steps that were observed.

    lost: the largest share of a tensor's nonzero gradient that became zero, None where it was not measured.
    stopped: the step that did not come to its end. invariant: whether gradients were equal at every loss scale, None
    where that was not judged: what was clipped or added unscaled does no harm then.
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
