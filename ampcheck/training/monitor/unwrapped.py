"""What optimizers and tensors are inside their wrappers, and what an optimizer keeps of its parameters."""

from __future__ import annotations

from typing import Any

import torch

from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of
from ampcheck.training.stagnation.shadows import spacing


def plain_optimizer(value: Any) -> torch.optim.Optimizer:
    """The optimizer that makes the steps, inside what a library wraps around it (Accelerate, Lightning).

    Raises `UsageError` for what is no optimizer.
    """
    one = value
    while not hasattr(one, "_optimizer_step_pre_hooks") and hasattr(one, "optimizer"):
        one = one.optimizer
    if not isinstance(one, torch.optim.Optimizer) or not hasattr(one, "_optimizer_step_pre_hooks"):
        raise UsageError(f"what steps the weights must be a torch.optim.Optimizer; found {type(value).__name__}")
    return one


def owner_of(thing: Any, name: str) -> type:
    """The class that defines a method of an object."""
    return next(kind for kind in type(thing).__mro__ if name in vars(kind))


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside its wrappers; what is none comes back as it is."""
    try:
        return plain_optimizer(optimizer)
    except UsageError:
        return optimizer


def local(tensor: Any) -> Any:
    """The part of a sharded tensor that this process holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def wide_copy(optimizer: torch.optim.Optimizer, parameter: torch.Tensor | None) -> str:
    """What an optimizer keeps beside a narrow parameter that takes up what the parameter cannot: a copy in float32."""
    if parameter is None or parameter.dtype.itemsize >= 4:
        return ""
    state = optimizer.state.get(parameter, {})
    plain = local(parameter).detach()
    for name, kept in state.items() if isinstance(state, dict) else ():
        one = local(kept)
        wide = isinstance(one, torch.Tensor) and one.is_floating_point() and one.dtype.itemsize >= 4
        if wide and one.shape == plain.shape and bool((one.to(plain.dtype) == plain).float().mean() > 0.9):
            return f"{name} is a copy of it in {str(one.dtype).removeprefix('torch.')}"
    return ""


_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def narrow_rest(optimizer: torch.optim.Optimizer, parameter: torch.Tensor | None) -> str:
    """What an optimizer keeps beside a narrow parameter that takes up what rounding drops: Kahan's compensation.

    It is as narrow as the parameter, and nowhere larger than the distance to the parameter's next number: what is of a
    size of its own, as a momentum, is larger where weights are small.
    """
    if parameter is None or parameter.dtype.itemsize >= 4 or not parameter.dtype.is_floating_point:
        return ""
    state = optimizer.state.get(parameter, {})
    plain = local(parameter).detach()
    gaps = None
    for name, kept in state.items() if isinstance(state, dict) else ():
        one = local(kept)
        if name in _MOMENTS or not isinstance(one, torch.Tensor) or one.shape != plain.shape or not one.numel():
            continue
        if one.dtype.is_floating_point and one.dtype.itemsize < 4 and one.layout is torch.strided:
            gaps = spacing(plain.double(), format_of(plain.dtype)) if gaps is None else gaps
            if bool((one != 0).any() & (one.abs() <= gaps).all()):
                return f"{name} takes up what rounding drops"
    return ""
