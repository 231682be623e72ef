"""Ops that draw numbers: the draws of the run are data."""

from __future__ import annotations

from typing import Any

import torch

from ampcheck.shadow.call import Call, Side
from ampcheck.shadow.rules.registry import restart, rule


@rule("native_dropout")
def _dropout(call: Call, side: Side) -> Any:
    """Dropout by the mask that the run drew."""
    x, probability, train = call.args[0], call.args[1], call.argument("train")
    if not train or probability == 1:
        return [side.of(x) * (0 if train else 1), None]
    return [side.of(x) * call.out[1] * (1 / (1 - probability)), None]


@rule("rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional")
def _rrelu(call: Call, side: Side) -> Any:
    """A leaky ReLU by the slopes that the run drew; they are 1 for what is positive."""
    x, noise = side.of(call.args[0]), call.args[1]
    if call.argument("training"):
        noise = call.out[1] if call.name.endswith("functional") else noise
        side.of(noise).copy_(noise)
        result = x * side.convert(noise)
    else:
        slope = (call.argument("lower") + call.argument("upper")) / 2
        result = torch.nn.functional.leaky_relu(x, slope)
    return [result, None] if call.name.endswith("functional") else result


@rule("normal")
def _normal(call: Call, side: Side) -> Any:
    """A normal distribution whose mean or deviation was computed: the draw is that of the standard one."""
    mean, deviation = call.argument("mean"), call.argument("std")
    if not isinstance(mean, torch.Tensor) and not isinstance(deviation, torch.Tensor):
        return restart(call, side)
    draw = (side.convert(call.out) - side.convert_value(mean)) / side.convert_value(deviation)
    return side.lift(mean) + side.lift(deviation) * torch.where(draw.isfinite(), draw, 0.0)
