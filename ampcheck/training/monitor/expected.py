"""How often a narrow parameter would move if its optimizer rounded stochastically, against how often it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ampcheck.core.formats import format_of
from ampcheck.training.monitor.unwrapped import local
from ampcheck.training.stagnation.shadows import spacing

_SAMPLE = 4096

_FAR = 0.25
"""An update of this part of the spacing is one that rounding to nearest drops, also if it is twice as large."""


def rounds_to_nearest(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is known that updates are rounded to the nearest number and the rest dropped: PyTorch's do so."""
    return type(optimizer).__module__.startswith("torch.optim")


def sampled(numel: int) -> int:
    """How many of the elements of a parameter `expected_moves` looks at."""
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
    number of spacing `s` with a chance of `u / s`, be it rounded stochastically or, in the long run, compensated.
    """

    def some(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.reshape(-1)
        return flat[:: flat.numel() // _SAMPLE | 1]

    old, slope = some(before).double(), some(gradient).double()
    share = _step_size(slope, some, group, state, before.shape) / spacing(old, format_of(before.dtype))
    far = (slope != 0) & (share < _FAR)
    return torch.stack(((share * far).sum(), (far & (some(after) != some(before))).sum().double()))


def _step_size(
    slope: torch.Tensor, some: Any, group: Mapping[str, Any], state: Mapping[Any, Any], shape: torch.Size
) -> torch.Tensor:
    """How far a step goes at least: by moments where they are kept, else in proportion to the gradient or by its sign,
    whichever is less."""
    rate = group.get("lr", 0.0)
    first, second = (local(state.get(name)) for name in ("exp_avg", "exp_avg_sq"))
    if all(isinstance(one, torch.Tensor) and one.shape == shape for one in (first, second)):
        steps, betas = state.get("step", group.get("step")), group.get("betas")
        mean, square = some(first).double(), some(second).double()
        if steps is not None and betas is not None:
            mean, square = mean / (1 - betas[0] ** steps), square / (1 - betas[1] ** steps)
        ratio = (mean.abs() / (square.sqrt() + group.get("eps", 1e-8))).nan_to_num(0.0)
    else:
        ratio = slope.abs().nan_to_num(0.0)
    size: torch.Tensor = ratio.clamp(max=1.0) * rate
    return size
