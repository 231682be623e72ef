"""In which formats was a loss computed? Read from its autograd graph, which keeps the dtype of every result."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from ampcheck.torchtools.private import without_modes

_SEARCHED = 500
"""How many autograd nodes behind a loss are looked at: its reductions stand near the end."""

_LOSS = re.compile(r"Loss|CrossEntropy")
"""Nodes of loss functions, PyTorch's and custom ones. What they are given belongs to the model, not to the loss."""

_REDUCES = re.compile(
    r"^(Mean|Sum|Nansum|Prod|Dot|Vdot|LinalgVectorNorm|Norm|Logsumexp|Trace|Std|Var|Nanmean)Backward\d*$"
)
"""Nodes that make the one number of a loss from many."""

_COMBINES = re.compile(
    r"^(ToCopy|Mul|Div|Add|Sub|Rsub|Neg|View|UnsafeView|Reshape|ReshapeAlias|Squeeze|Unsqueeze|Alias|Clone|Stack|Cat|"
    r"Select|Unbind|Expand|Where|MaskedFill|MaskedSelect|Index)Backward\d*$"
)
"""Nodes that scale, add, cast or reshape losses and parts of them."""

_LISTS = ("Stack", "Cat", "ToCopy")
"""Nodes by which several losses become one tensor, which is then summed."""


def computed_in(loss: torch.Tensor) -> tuple[torch.dtype, ...]:
    """The 16-bit dtypes in which a loss, or a part of it, was computed; empty for one in float32 throughout.

    The dtype of the tensor is no evidence: a bfloat16 mean may be cast, multiplied by a float32 loss scale or added to
    another loss afterwards. So the graph is followed from the loss through casts, sums and factors up to the reductions
    and loss functions that made it; these count by the dtype of their result. What a model computes in 16 bits before
    them does not. Nothing is run. Of compiled code only the dtype of its result is known.
    """
    found: dict[torch.dtype, None] = {loss.dtype: None} if _is_low(loss.dtype) else {}
    waiting: list[tuple[Any, bool]] = [] if loss.grad_fn is None else [(loss.grad_fn, True)]
    seen: set[Any] = set()
    while waiting and len(seen) < _SEARCHED:
        node, alone = waiting.pop(0)  # alone: single numbers, or lists of them, all the way from the loss
        if node in seen:
            continue
        seen.add(node)
        name = node.name().rpartition("::")[2]
        results = _results(node)
        single = bool(results) and all(count == 1 for _, count in results)
        alone = alone and (single or name.startswith(_LISTS))
        before = [following for following, _ in node.next_functions if following is not None]
        is_loss, combines = bool(_LOSS.search(name)), bool(_REDUCES.match(name) or _COMBINES.match(name))
        if is_loss or (alone and (_reduces(name, before) or _rounds(name, before))):
            found.update(dict.fromkeys(dtype for dtype, _ in results if _is_low(dtype)))
        if combines and not is_loss:
            waiting += [(following, alone) for following in before]
    return tuple(found)


def factor_of(loss: torch.Tensor) -> float:
    """The number by which a loss was multiplied last: 1 where it was not, or by what has a gradient itself."""
    node = loss.grad_fn
    if node is None or node.name() != "MulBackward0" or None not in {following for following, _ in node.next_functions}:
        return 1.0
    factors = [value for value in (node._saved_self, node._saved_other) if value is not None]  # type: ignore[attr-defined]
    if len(factors) != 1 or factors[0].numel() != 1 or factors[0].is_complex() or factors[0].is_meta:
        return 1.0
    with without_modes():  # to them a number that became a tensor is no tensor
        return float(factors[0])


def _reduces(name: str, before: Sequence[Any]) -> bool:
    """Whether a node makes one number of several."""
    return bool(_REDUCES.match(name)) and any(count != 1 for node in before for _, count in _results(node))


def _rounds(name: str, before: Sequence[Any]) -> bool:
    """Whether a node is the cast of a loss that was wider."""
    wider = [node for node in before if any(not _is_low(dtype) for dtype, _ in _results(node))]
    return name.startswith("ToCopy") and any(_LOSS.search(node.name()) or _REDUCES.match(node.name()) for node in wider)


def _results(node: object) -> list[tuple[torch.dtype, int]]:
    """(dtype, elements) of what a node gave in forward; empty where PyTorch keeps neither, as of nested tensors."""
    with suppress(Exception):
        return [(result.dtype, math.prod(result.shape)) for result in getattr(node, "_input_metadata", None) or ()]
    return []


def _is_low(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize <= 2
