"""The gradients that an optimizer has: their values, which of them changed, and which the code itself assigned."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from ampcheck.torchtools.storage import local
from ampcheck.training.loop import parameters_of


class AssignedGradients:
    """Finds gradients that the code assigned after a step, such as those of `torch.autograd.grad`."""

    def __init__(self) -> None:
        self._stepped_with: dict[str, list[weakref.ref[torch.Tensor]]] = {}

    def stepped(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Remember the gradients that a scaler has stepped this optimizer with."""
        grads = (parameter.grad for parameter in parameters_of(optimizer))
        self._stepped_with[name] = [weakref.ref(grad) for grad in grads if grad is not None]

    def since_step(self, name: str, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether no gradient is one of those."""
        before = {id(grad) for kept in self._stepped_with.get(name, ()) if (grad := kept()) is not None}
        grads = [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]
        return name in self._stepped_with and not any(id(grad) in before for grad in grads)


def gradients_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter that has a gradient, with the values of it on this process; of a sparse one the stored ones."""
    for parameter in parameters_of(optimizer):
        grad = parameter.grad
        if grad is not None:
            yield parameter, local(grad._values() if grad.is_sparse else grad)


def versions_of(optimizer: torch.optim.Optimizer) -> dict[int, tuple[int, int]]:
    """The identity and version of each gradient, by the id of its parameter: what a backward pass touches differs."""
    grads = ((id(parameter), parameter.grad) for parameter in parameters_of(optimizer))
    return {number: (id(grad), grad._version) for number, grad in grads if grad is not None}


def found_inf(scaler: Any, optimizer: torch.optim.Optimizer) -> bool | None:
    """Return what the scaler itself found. A fused optimizer is called all the same and skips inside its kernel."""
    with suppress(Exception):
        by_device = scaler._found_inf_per_device(optimizer)
        return bool(sum(value.item() for value in by_device.values())) if by_device else None
    return None
