"""Optimizers inside their wrappers, how they round, and what they keep of the rounding errors of a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of
from ampcheck.torchtools.spacing import spacing
from ampcheck.torchtools.storage import local

_SAMPLE = 4096

_FAR = 0.25
"""An update of this part of the spacing is one that rounding to nearest drops, also if it is twice as large."""

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def plain_optimizer(value: object) -> torch.optim.Optimizer:
    """The optimizer that makes the steps, inside the wrapper of a library (Accelerate, Lightning).

    Raises `UsageError` for anything else.
    """
    optimizer = unwrapped(value)
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise UsageError(f"what steps the weights must be a torch.optim.Optimizer; found {type(value).__name__}")
    return optimizer


def unwrapped(value: object) -> Any:
    """The innermost `optimizer` of wrappers around optimizers."""
    while not hasattr(value, "_optimizer_step_pre_hooks") and hasattr(value, "optimizer"):
        value = value.optimizer
    return value


def rounds_to_nearest(optimizer: torch.optim.Optimizer) -> bool:
    """Whether updates are known to be rounded to the nearest number, as those of PyTorch's optimizers are."""
    return type(optimizer).__module__.startswith("torch.optim")


def is_compensated(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Whether an optimizer keeps what a narrow parameter drops: a float32 copy, or (Kahan) the rounding errors.

    A compensation is as narrow as the parameter, and nowhere larger than the distance to the parameter's next number; a
    momentum is larger where weights are small.
    """
    state = optimizer.state.get(parameter, {})
    if parameter.dtype.itemsize >= 4 or not parameter.dtype.is_floating_point or not isinstance(state, dict):
        return False
    plain = local(parameter)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        tensor = local(value)
        if tensor.shape != plain.shape or not tensor.numel() or tensor.layout is not torch.strided:
            continue
        if tensor.dtype.itemsize >= 4:
            if bool((tensor.to(plain.dtype) == plain).float().mean() > 0.9):
                return True
            continue
        if name in _MOMENTS or rounds_to_nearest(optimizer):
            continue
        if bool((tensor != 0).any() & (tensor.abs() <= spacing(plain.double(), format_of(plain.dtype))).all()):
            return True
    return False


def sampled(numel: int) -> int:
    """How many of the elements of a parameter `expected_moves` samples."""
    return len(range(0, numel, numel // _SAMPLE | 1))


def expected_moves(
    before: torch.Tensor,
    after: torch.Tensor,
    gradient: torch.Tensor,
    group: Mapping[str, Any],
    state: Mapping[Any, Any],
) -> torch.Tensor:
    """[2], float64: how many of a sample of elements unbiased rounding would have moved in a step, and how many moved.

    Only of those whose update is so small, by their spacing, that rounding to nearest drops it. A change of `u` moves a
    number of spacing `s` with a probability of `u / s`, be it rounded stochastically or, in the long run, compensated.
    """
    old, slope = _sample(before).double(), _sample(gradient).double()
    share = _step_size(slope, group, state, before.shape) / spacing(old, format_of(before.dtype))
    far = (slope != 0) & (share < _FAR)
    return torch.stack(((share * far).sum(), (far & (_sample(after) != _sample(before))).sum().double()))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return flat[:: flat.numel() // _SAMPLE | 1]


def _step_size(
    slope: torch.Tensor, group: Mapping[str, Any], state: Mapping[Any, Any], shape: torch.Size
) -> torch.Tensor:
    """A lower bound of the step: by moments where there are any, else in proportion to the gradient or by its sign,
    whichever is less."""
    moments = [local(m) for name in ("exp_avg", "exp_avg_sq") if isinstance(m := state.get(name), torch.Tensor)]
    if len(moments) == 2 and all(moment.shape == shape for moment in moments):
        mean, square = (_sample(moment).double() for moment in moments)
        steps, betas = state.get("step", group.get("step")), group.get("betas")
        if steps is not None and betas is not None:
            mean, square = mean / (1 - betas[0] ** steps), square / (1 - betas[1] ** steps)
        ratio = mean.abs() / (square.sqrt() + group.get("eps", 1e-8))
    else:
        ratio = slope.abs()
    size: torch.Tensor = ratio.nan_to_num(0.0).clamp(max=1.0) * group.get("lr", 0.0)
    return size
