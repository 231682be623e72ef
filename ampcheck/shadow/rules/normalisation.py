"""Softmax and normalisation."""

from __future__ import annotations

from typing import Any

import torch

from ampcheck.shadow.bounds import floor_of
from ampcheck.shadow.call import Call, Side
from ampcheck.shadow.rules.registry import rule


@rule("_softmax", "_log_softmax")
def _softmax(call: Call, side: Side) -> Any:
    """A softmax that does not convert: its third argument is for float16 alone."""
    return call.op(side.of(call.args[0]), call.args[1], False)


@rule(
    "native_batch_norm_backward", "native_layer_norm_backward", "native_group_norm_backward", "batch_norm_backward",
    "cudnn_batch_norm_backward", "miopen_batch_norm_backward", "_fused_rms_norm_backward",
)  # fmt: skip
def _normalisation(call: Call, side: Side) -> Any:
    """Move what comes in 16 bits by its own roundings as well: the gradient, and statistics that such a kernel keeps.

    No input changes the mean or the norm of a normalised value, so the parts of the gradient along them cancel. Where
    nothing else is left of it, as of the mean of squares of such a value, no run in 16 bits can have the rest.
    """
    return (side if side.name == "exact" else _Rounded(side.store, "moved")).run(call)


class _Rounded(Side):
    """The moved companions, those of values of 16 bits moved by their own roundings too."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = super().of(tensor)
        if tensor.dtype.itemsize > 2:
            return moved
        shaken = self.store.moves.shake(moved.reshape(-1)).view(moved.shape)
        return moved + (shaken - moved) * floor_of(self.store.of(tensor).depth)
