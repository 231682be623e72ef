"""Ends code after its last observed step, also code that catches every exception."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampcheck.core.errors import EnoughSteps
from ampcheck.torchtools.patching import replaced

_PATIENCE = 3
"""So many exceptions may be caught, by code that tries a step again, before lines raise them as well."""

_CAUGHT = 1000
"""So many exceptions are raised; nothing but the end of the process ends code that catches them all."""

_SENTENCE = (
    f"ampcheck: the code that trains caught {_CAUGHT:,} exceptions that were to end it after its last observed step: "
    "catch Exception, not BaseException (a bare `except:`), so that Ctrl-C can end it too\n"
)


class Stopper:
    """Raises `EnoughSteps` each time that code goes on after its last step.

    Where it is caught, a line that runs next raises it again, outside of the `try` that caught it. Code that catches
    all of these too ends with its process (exit code 2). raised: how often it was raised.
    """

    def __init__(self) -> None:
        self.raised = 0
        self._traced: dict[FrameType, Any] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the code that is to be ended; the trace functions of the process are restored at its end."""
        tracer = sys.gettrace()
        try:
            yield
        finally:
            if self._traced:
                sys.settrace(tracer)
            for frame, own in self._traced.items():
                frame.f_trace = own
            self._traced.clear()

    def stop(self) -> NoReturn:
        """End the code that calls this."""
        self.raised += 1
        if self.raised > _CAUGHT:
            if sys.__stderr__ is not None:
                sys.__stderr__.write(_SENTENCE)
                sys.__stderr__.flush()
            os._exit(2)
        if self.raised > _PATIENCE:
            self._raise_in_lines(*divmod(self.raised - _PATIENCE - 1, 2))
        raise EnoughSteps

    def _raise_in_lines(self, left: int, behind: int) -> None:
        """Let a line of the callers raise: of those inside of `except`, or of those behind it, the one after `left`.

        A line inside may belong to a `finally` that passes the exception on, one behind it to another `try`.
        Python forgets a trace function that has raised.
        """

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if event == "line" and isinstance(sys.exc_info()[1], EnoughSteps) != bool(behind):
                if not left:
                    raise EnoughSteps
                left -= 1
            return trace

        frame = sys._getframe(2).f_back
        while frame is not None:
            if frame.f_globals.get("__name__", "").partition(".")[0] not in ("ampcheck", "torch"):
                self._traced.setdefault(frame, frame.f_trace)
                frame.f_trace = trace
            frame = frame.f_back
        sys.settrace(lambda *_: None)


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
        with stopper.running(), replaced(torch.autograd, "backward", counting):
            return function()
    except EnoughSteps:
        return None
    finally:
        hook.remove()
