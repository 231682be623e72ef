"""Ops that return values with their indices: companions are taken at the indices of the run."""

from __future__ import annotations

from typing import Any

import torch

from ampcheck.shadow.call import Call, Side
from ampcheck.shadow.rules.registry import rule


@rule("topk", "sort", "kthvalue", "median", "nanmedian", "mode", "max", "min", "cummax", "cummin")
def _selected(call: Call, side: Side) -> Any:
    """Values along one dimension."""
    if not isinstance(call.out, (list, tuple)) or len(call.out) != 2:  # the largest of all, an elementwise maximum
        return side.run(call)
    x, (values, index) = side.of(call.args[0]), call.out
    if not x.dim():
        return [x.reshape(values.shape).clone(), None]
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


@rule("_embedding_bag", "_embedding_bag_forward_only")
def _bags(call: Call, side: Side) -> Any:
    """Sums, means or maxima of bags of rows; the largest of a bag is where the run found it."""
    if call.argument("mode") != 2:
        return [next(iter(side.run(call))), None, None, None]
    values, _, sizes, index = call.out
    if index.shape != values.shape:
        return [None, None, None, None]
    picked = side.of(call.args[0]).gather(0, index.clamp_min(0))
    return [picked * (sizes[: len(values)] > 0).unsqueeze(1), None, None, None]


@rule("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive")
def _different(call: Call, side: Side) -> Any:
    """Values that differ in the run: the companion of the first element of each."""
    x, dim = call.args[0], call.argument("dim")
    inverse = call.out[1]
    if not inverse.numel() or inverse.numel() != (x.numel() if dim is None else x.shape[dim]):
        arguments = {a.name: call.argument(a.name) for a in call.op._schema.arguments if not a.is_out}
        functional = getattr(torch.ops.aten, call.name).default
        inverse = functional(**{**arguments, "return_inverse": True})[1]
    companion, flat = side.of(x), inverse.reshape(-1)
    rows = call.out[0].shape[0 if dim is None else dim]
    positions = torch.arange(flat.numel(), device=flat.device)
    first = positions.new_full((rows,), flat.numel()).scatter_reduce(0, flat, positions, "amin")
    values = companion.reshape(-1)[first] if dim is None else companion.index_select(dim, first)
    return [values, *([None] * (len(call.out) - 1))]
