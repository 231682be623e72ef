"""Ends code after its last observed step."""

from __future__ import annotations

from collections.abc import Callable

from ampcheck.core.errors import EnoughSteps
from ampcheck.stream.calls import subscribed

_CAUGHT = 1000
"""So many exceptions are raised; code that catches them all runs on, and ends by itself."""


class Stopper:
    """Raises `EnoughSteps` each time that code goes on after its last step, until it was caught too often.

    raised: how often it was raised.
    """

    def __init__(self) -> None:
        self.raised = 0

    @property
    def ignored(self) -> bool:
        """True if the code catches every exception, as a bare `except:` in its loop does."""
        return self.raised >= _CAUGHT

    def stop(self) -> None:
        """End the code that calls this."""
        if not self.ignored:
            self.raised += 1
            raise EnoughSteps


def ended_after(steps: int, function: Callable[[], object]) -> object:
    """The result of a function that trains; None where it is ended, as it goes on after so many steps.

    Steps are counted by optimizers, and by backward passes where more than eight come to a step: Dynamo does not trace
    `backward`, while the step of an optimizer may be compiled.
    """
    stopper, taken, passes = Stopper(), 0, 0

    def before_step(*_: object, **__: object) -> None:
        nonlocal taken
        taken += 1
        if taken > steps:
            stopper.stop()

    def before_backward(*_: object, accumulate_grad: bool = False, **__: object) -> None:
        nonlocal passes
        passes += accumulate_grad  # not torch.autograd.grad
        if accumulate_grad and (taken >= steps or passes > 8 * steps):
            stopper.stop()

    try:
        with subscribed(optimizer_step=before_step, backward=before_backward):
            return function()
    except EnoughSteps:
        return None
