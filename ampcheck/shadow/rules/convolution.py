"""Convolutions with few positions: float64 has no kernel that reads the weight once for a whole batch.

PyTorch's own convolution in float64 multiplies sample by sample. In the last stages of a network a sample has a few
positions, and the weights are large: one product for all samples takes two thirds of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ampcheck.shadow.call import Call, Side
from ampcheck.shadow.rules.registry import rule

_POSITIONS = 16
"""Positions of a sample, at the most."""

_TERMS = 1024
"""Terms of each sum, at least."""

_COLUMNS = 1 << 22
"""Elements of the unfolded batch, at the most."""


@rule("convolution")
def _convolution(call: Call, side: Side) -> Any:
    """The product of the weight and the patches of all samples."""
    inputs, weight, bias, stride, padding, *rest = call.args
    if not _is_small(call.out, inputs, weight, side, rest):
        return side.run(call)
    columns = _columns(side.of(inputs), weight.shape[2:], stride, padding)
    result = side.of(weight).reshape(len(weight), -1) @ columns
    if bias is not None:
        result += side.of(bias).unsqueeze(1)
    batch, channels, *size = call.out.shape
    return result.view(channels, batch, *size).transpose(0, 1).contiguous()


@rule("convolution_backward")
def _backward(call: Call, side: Side) -> Any:
    """The gradients of input, weight and bias."""
    gradient, inputs, weight, _, stride, padding, *rest, mask = call.args
    if not _is_small(gradient, inputs, weight, side, rest):
        return side.run(call)
    of_result = side.of(gradient).transpose(0, 1).reshape(len(weight), -1)
    of_input = of_weight = None
    if mask[0]:
        batch, positions = len(gradient), gradient.shape[2:].numel()
        of_columns = side.of(weight).reshape(len(weight), -1).t() @ of_result
        patches = of_columns.view(-1, batch, positions).transpose(0, 1)
        of_input = F.fold(patches, inputs.shape[2:], weight.shape[2:], 1, padding, stride)
    if mask[1]:
        columns = _columns(side.of(inputs), weight.shape[2:], stride, padding)
        of_weight = (of_result @ columns.t()).view(weight.shape)
    return [of_input, of_weight, of_result.sum(1) if mask[2] else None]


def _is_small(
    result: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, side: Side, rest: Sequence[Any]
) -> bool:
    """Return whether one product is faster. rest: dilation, transposed, output padding and groups."""
    dilation, transposed, _, groups = rest
    if side.dtype is not torch.float64 or weight.dim() != 4 or inputs.dim() != 4 or transposed or groups != 1:
        return False
    terms, positions = weight.shape[1:].numel(), result.shape[2:].numel()
    return (
        not weight.is_complex()
        and weight.device.type == "cpu"
        and set(dilation) == {1}
        and 1 <= positions <= _POSITIONS
        and terms >= _TERMS
        and 1 < len(result) <= _COLUMNS // (terms * positions)
    )


def _columns(
    inputs: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> torch.Tensor:
    """The patches of all samples, a column each."""
    patches = F.unfold(inputs, tuple(kernel), 1, tuple(padding), tuple(stride))
    return patches.transpose(0, 1).reshape(patches.shape[1], -1)
