"""Ends code after its last observed step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampcheck.core.errors import EnoughSteps
from ampcheck.torchtools.patching import replaced

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
        """Whether the code catches every exception, as a bare `except:` in its loop does."""
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

    def before_step(*_: object) -> None:
        nonlocal taken
        if not torch.compiler.is_compiling():
            taken += 1
            if taken > steps:
                stopper.stop()

    def counting(original: Callable[..., object]) -> Callable[..., object]:
        def backward(*args: Any, **kwargs: Any) -> object:
            nonlocal passes
            passes += 1
            if taken >= steps or passes > 8 * steps:
                stopper.stop()
            return original(*args, **kwargs)

        return backward

    hook = register_optimizer_step_pre_hook(before_step)
    try:
        with replaced(torch.autograd, "backward", counting):
            return function()
    except EnoughSteps:
        return None
    finally:
        hook.remove()
