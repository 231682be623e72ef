"""The gradients of backward passes as autograd makes them, and the steps of optimizers that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.source import Hook, hookable
from ampcheck.torchtools.storage import placements
from ampcheck.training.loop import TrainingLoop


@contextmanager
def captured(loop: TrainingLoop, seen: Callable[[str, str, torch.Tensor], None], *, outputs: bool) -> Iterator[None]:
    """Give `seen` every gradient of the backward passes inside, with its kind (`parameter`, or `output` of a module)
    and name, as autograd makes it: scaled, before it is added up. What it keeps it must copy. Of a sharded parameter it
    gets the reduced gradient, after it was added up."""

    def note(kind: str, name: str, grad: torch.Tensor | None) -> None:
        with torch.no_grad(), _disable_current_modes():
            if grad is not None:  # as where a Function's backward returns None
                seen(kind, name, grad.detach())

    with ExitStack() as stack:
        for name, parameter in loop.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                handle: Any
                if placements(parameter):  # FSDP2 gives it a gradient without autograd, and calls these hooks alone
                    register: Any = parameter.register_post_accumulate_grad_hook
                    handle = register(Hook(partial(_reduced, note, name)))
                else:
                    handle = parameter.register_hook(Hook(partial(note, "parameter", name)))  # type: ignore[no-untyped-call]
                stack.callback(handle.remove)
        for path, root in loop.reached.modules.items() if outputs else ():
            for inner, module in hookable(root):
                hook = Hook(partial(_hook_outputs, partial(note, "output"), loop.path(path, inner)))
                stack.callback(module.register_forward_hook(hook).remove)
        yield


def _reduced(note: Callable[[str, str, torch.Tensor | None], None], name: str, parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        note("parameter", name, parameter.grad)


def _hook_outputs(note: Callable[..., None], name: str, module: object, args: object, output: object) -> None:
    if torch.is_grad_enabled():
        for path, tensor in tensors(output):
            if tensor.requires_grad and tensor.grad_fn is not None and tensor.is_floating_point():
                tensor.register_hook(Hook(partial(note, f"{name}[{path}]" if path else name)))
