"""The gradients of backward passes as autograd makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from ampcheck.torchtools.private import without_modes
from ampcheck.torchtools.source import Hook
from ampcheck.torchtools.storage import placements
from ampcheck.training.loop import TrainingLoop


@contextmanager
def captured(loop: TrainingLoop, seen: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Give `seen` every gradient of a parameter in the backward passes inside, with its name, as autograd makes it:
    scaled, before it is added up. What it keeps it must copy. Of a sharded one it gets the reduced gradient, after it
    was added up."""

    def note(name: str, grad: torch.Tensor | None) -> None:
        with torch.no_grad(), without_modes():
            if grad is not None:  # as where a Function's backward returns None
                seen(name, grad.detach())

    def reduced(name: str, parameter: torch.Tensor) -> None:
        note(name, parameter.grad)

    with ExitStack() as stack:
        for name, parameter in loop.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                handle: Any
                if placements(parameter):  # FSDP2 gives it a gradient without autograd, and calls these hooks alone
                    register: Any = parameter.register_post_accumulate_grad_hook
                    handle = register(Hook(partial(reduced, name)))
                else:
                    handle = parameter.register_hook(Hook(partial(note, name)))  # type: ignore[no-untyped-call]
                stack.callback(handle.remove)
        yield
