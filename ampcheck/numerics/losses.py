"""Losses to differentiate, of a result or its outputs with signs, and the formats in which a loss was computed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ampcheck.records.numerics import UNCOMPARED
from ampcheck.torchtools.copying import loss_of
from ampcheck.torchtools.private import without_modes
from ampcheck.torchtools.pytree import is_plain, tensors

_SEARCHED = 500
"""Autograd nodes behind a loss that are searched: its reductions stand near the end."""

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


def comparable(tensor: torch.Tensor) -> bool:
    """Return whether the values can be compared: float8 has no comparisons, and a meta tensor no values."""
    return is_floating(tensor) and tensor.numel() > 0 and is_plain(tensor) and tensor.dtype.itemsize > 1


def total_loss(result: object, loss: Callable[[Any], torch.Tensor] | None, finite: bool) -> torch.Tensor | None:
    """The loss: the user's, or the mean of squares of every floating output.

    An output that is listed several times counts once: to add its gradients in 16 bits would round. finite: leave out
    of the default loss what is not finite.
    """
    if loss is not None:
        return loss_of(loss, result)
    total: torch.Tensor | None = None
    counted: set[Any] = set()
    for _, tensor in tensors(result):
        if not comparable(tensor) or not tensor.requires_grad or (key := _identity(tensor)) in counted:
            continue
        counted.add(key)
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        wide = real if real.dtype is torch.float64 else real.float()
        wide = torch.where(wide.isfinite(), wide, 0.0) if finite else wide
        part = wide.square().mean()
        total = part if total is None else total + part
    return total


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The same for a tensor and its views of the same elements, unless an `autograd.Function` made one of them."""
    base = tensor
    node: Any = tensor.grad_fn
    if tensor._base is not None:
        base = tensor._base
        while node is not None and node is not base.grad_fn:
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                base = tensor
                break
            node = node.next_functions[0][0] if node.next_functions else None
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    return id(base), tensor.dtype, *place, tensor.is_conj(), tensor.is_neg()


def without_loss(result: object) -> tuple[str, bool]:
    """Why no loss can be made of an output, and whether that is for want of what the subject could return."""
    results = [tensor for _, tensor in tensors(result)]
    floating = [tensor for tensor in results if is_floating(tensor)]
    if any(tensor.requires_grad and tensor.numel() for tensor in floating):
        return f"the default loss takes no {UNCOMPARED}: give the subject a loss", True
    return "no floating output has a gradient", not results or any(tensor.numel() for tensor in floating)


def scalar_losses(result: object, total: torch.Tensor | None) -> list[torch.dtype]:
    """In which dtype what can only be a loss was computed: the user's own, or 0-d outputs that carry a gradient."""
    losses = [t for _, t in tensors(result) if t.dim() == 0 and t.is_floating_point() and t.requires_grad]
    if total is not None:
        losses = [total]
    return [next(iter(computed_in(loss)), loss.dtype) for loss in losses]


def is_scalar(result: object) -> bool:
    """Return whether all that a module gives is one 0-d tensor: a loss module has no parameters, and its inputs
    gradients."""
    return [tensor.dim() for _, tensor in tensors(result)] == [0]


def is_floating(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds real or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def scaled(loss: torch.Tensor, scale: float) -> torch.Tensor:
    """The first gradient of a loss: its scale, where a GradScaler's multiplication puts it. No op of ours is in it."""
    try:
        return torch.full_like(loss, scale)
    except RuntimeError:  # PyTorch 2.6 writes no number beyond the format
        return torch.full_like(loss, scale, dtype=torch.float32).to(loss.dtype)


def signs(tensor: torch.Tensor) -> torch.Tensor:
    """Random signs, which are those of every tensor with as many elements."""
    generator = torch.Generator().manual_seed(tensor.numel())
    drawn = torch.randint(0, 2, (tensor.numel(),), generator=generator).mul_(2).sub_(1)
    return drawn.view(tensor.shape).to(tensor)


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
    """Return whether a node makes one number of several."""
    return bool(_REDUCES.match(name)) and any(count != 1 for node in before for _, count in _results(node))


def _rounds(name: str, before: Sequence[Any]) -> bool:
    """Return whether a node is the cast of a loss that was wider."""
    wider = [node for node in before if any(not _is_low(dtype) for dtype, _ in _results(node))]
    return name.startswith("ToCopy") and any(_LOSS.search(node.name()) or _REDUCES.match(node.name()) for node in wider)


def _results(node: object) -> list[tuple[torch.dtype, int]]:
    """(dtype, elements) of what a node gave in forward; empty where PyTorch keeps neither, as of nested tensors."""
    with suppress(Exception):
        return [(result.dtype, math.prod(result.shape)) for result in getattr(node, "_input_metadata", None) or ()]
    return []


def _is_low(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize <= 2
