"""Derivatives of functions with kinks: which side of a kink a value is on is a decision of the run.

Forward is continuous there and needs no rule; its derivative jumps, and one value that lies on the other side in exact
would make a whole gradient look wrong.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ampcheck.shadow.call import Call, Side
from ampcheck.shadow.rules.registry import rule


@rule(
    "threshold_backward", "leaky_relu_backward", "hardtanh_backward", "hardsigmoid_backward", "softshrink_backward",
    "hardshrink_backward",
)  # fmt: skip
def _masked(call: Call, side: Side) -> Any:
    """The gradient times a number that depends on the side of the kink alone."""
    gradient, value = call.args[:2]
    return call.op(side.of(gradient), side.convert(value), *call.args[2:], **call.kwargs)


@rule("hardswish_backward")
def _hardswish(call: Call, side: Side) -> Any:
    """0 below -3, the gradient above 3, between them the derivative of x (x + 3) / 6."""
    gradient, value = side.of(call.args[0]), call.args[1]
    inside = gradient * (side.of(value) / 3 + 0.5)
    return torch.where(value <= -3, gradient * 0, torch.where(value < 3, inside, gradient))


@rule("_prelu_kernel_backward")
def _prelu(call: Call, side: Side) -> Any:
    """The gradients of the input and of the slopes."""
    gradient, value, weight = (side.of(t) for t in call.args)
    positive = call.args[1] > 0
    return [torch.where(positive, gradient, weight * gradient), torch.where(positive, gradient * 0, value * gradient)]


@rule("angle")
def _angle(call: Call, side: Side) -> Any:
    """The angle on the branch that the run took."""
    exact = side.run(call)
    return exact + 2 * math.pi * ((side.convert(call.out) - exact) / (2 * math.pi)).round()
