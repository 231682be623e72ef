"""Ops that draw numbers: the draws of the run are data."""

from __future__ import annotations

from typing import Any

from ampcheck.shadow.call import Call, Side
from ampcheck.shadow.rules.registry import rule


@rule("native_dropout")
def _dropout(call: Call, side: Side) -> Any:
    """Dropout by the mask that the run drew."""
    x, probability, train = call.args[0], call.args[1], call.argument("train")
    if not train or probability == 1:
        return [side.run(call)[0], None] if not train else [side.of(x) * 0, None]
    return [side.of(x) * call.out[1] / (1 - probability), None]


@rule("rrelu_with_noise", "rrelu_with_noise_functional")
def _rrelu(call: Call, side: Side) -> Any:
    """A leaky ReLU by the slopes that the run drew."""
    x, noise = side.of(call.args[0]), call.args[1]
    if not call.argument("training"):
        slope = (call.argument("lower") + call.argument("upper")) / 2
        return x.where(x > 0, x * slope)
    side.of(noise).copy_(noise)
    return x.where(call.args[0] > 0, x * side.convert(noise))
