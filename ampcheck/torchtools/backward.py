"""The backward pass of a loss."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.overrides import has_torch_function


def backward(loss: torch.Tensor, gradient: torch.Tensor, inputs: Iterable[torch.Tensor]) -> None:
    """Call `torch.autograd.backward(loss, gradient, inputs=inputs)`, without its import of SymPy, which takes 0.5 s.

    gradient: shape and dtype of the loss; PyTorch imports SymPy to compare them.
    """
    leaves = tuple(inputs)
    if has_torch_function((loss, *leaves)):  # a subclass of tensors may have a backward pass of its own
        torch.autograd.backward(loss, gradient, inputs=leaves)
        return
    torch.autograd._engine_run_backward(  # type: ignore[attr-defined]
        (loss,), (gradient,), False, False, leaves, allow_unreachable=True, accumulate_grad=True
    )
