"""Ops that return values with their indices: companions are taken at the indices of the run."""

from __future__ import annotations

from typing import Any

import torch

from ampcheck.shadow.call import Call, Side
from ampcheck.shadow.rules.registry import rule


@rule("topk", "sort", "kthvalue", "median", "nanmedian", "mode", "max", "min", "cummax", "cummin", "_cummax_helper")
def _selected(call: Call, side: Side) -> Any:
    """Values along one dimension."""
    if not isinstance(call.out, (list, tuple)) or len(call.out) != 2:  # the largest of all, an elementwise maximum
        return side.run(call)
    x, (values, index) = side.of(call.args[0]), call.out
    if not x.dim():
        return [x.reshape(values.shape), None]
    dim = call.argument("dim", -1)
    lost = index.dim() < x.dim()
    picked = x.gather(dim, index.unsqueeze(dim) if lost else index)
    return [picked.squeeze(dim) if lost else picked, None]


@rule(
    "max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "fractional_max_pool2d", "fractional_max_pool3d",
)  # fmt: skip
def _pooled(call: Call, side: Side) -> Any:
    """Values in the last two or three dimensions, flattened."""
    space = 3 if "3d" in call.name else 2
    values, index = call.out
    picked = side.of(call.args[0]).flatten(-space).gather(-1, index.flatten(-space))
    return [picked.view(values.shape), None]


@rule("aminmax")
def _extremes(call: Call, side: Side) -> Any:
    """The smallest and the largest."""
    return list(torch.aminmax(side.of(call.args[0]), **{k: v for k, v in call.kwargs.items() if k != "out"}))
