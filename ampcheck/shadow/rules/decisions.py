"""Ops whose floating results are decisions, or follow those of a `GradScaler`: companions take those of the run.

So are the sides of a kink on which values are. Forward is continuous there and needs no rule; its derivative jumps, and
one value that lies on the other side in exact would make a whole gradient look wrong.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ampcheck.shadow.call import Call, Side
from ampcheck.shadow.companions import roundoff
from ampcheck.shadow.memory import finite
from ampcheck.shadow.rules.registry import restart, rule

rule(
    "sign", "floor", "ceil", "round", "trunc", "fix", "floor_divide", "heaviside", "nextafter",
    "sign_", "floor_", "ceil_", "round_", "trunc_", "floor_divide_", "heaviside_", "nextafter_",
    "_foreach_sign", "_foreach_round", "_foreach_floor", "_foreach_ceil", "_foreach_trunc",
    "_foreach_sign_", "_foreach_round_", "_foreach_floor_", "_foreach_ceil_", "_foreach_trunc_",
    "_amp_update_scale_", "histogram", "_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors",
)(restart)  # fmt: skip


@rule("histc")
def _counted(call: Call, side: Side) -> Any:
    """The bins that the run chose; one that was counted to the end of the integers of its format stopped there."""
    wide: torch.Tensor = side.convert(call.out)
    if call.written:
        return restart(call, side)
    counts = call.op(call.args[0].double(), *call.args[1:], **call.kwargs).to(wide.dtype)
    return torch.where(wide >= 1 / roundoff(call.out.dtype), torch.maximum(counts, wide), wide)


@rule("sgn", "sgn_")
def _direction(call: Call, side: Side) -> Any:
    """The sign of a real number is a decision; z / |z| of a complex one is none."""
    return side.run(call) if call.args[0].is_complex() else restart(call, side)


@rule("div", "div_")
def _divide(call: Call, side: Side) -> Any:
    """A quotient; one that is rounded to an integer is a decision."""
    if call.argument("rounding_mode") is None:
        return side.run(call)
    return restart(call, side)


@rule("remainder", "fmod", "remainder_", "fmod_")
def _remainder(call: Call, side: Side) -> Any:
    """What is left over after as many divisors as the run took away."""
    dividend, divisor = call.argument("self"), call.argument("other")
    before = dividend if call.kept is None else call.kept
    wide = (v.double() if isinstance(v, torch.Tensor) else v for v in (before, call.out, divisor))
    start, left, step = wide
    times = ((start - left) / step).round()
    times = times.to(side.dtype)
    result = side.lift(dividend) - times * side.lift(divisor)
    return torch.where(finite(call.out), result, side.convert(call.out))


@rule("frac", "frac_")
def _fraction(call: Call, side: Side) -> Any:
    """What is left over after the integer that the run took away."""
    x = call.args[0]
    return side.of(x) - side.convert(x if call.kept is None else call.kept).trunc()


@rule("frexp")
def _mantissa(call: Call, side: Side) -> Any:
    """The mantissa that belongs to the exponent of the run."""
    return [torch.ldexp(side.of(call.args[0]), -call.out[1]), None]


@rule("grid_sampler_2d", "grid_sampler_3d")
def _sampled(call: Call, side: Side) -> Any:
    """Samples of an image; which pixel is the nearest one is a decision."""
    if call.args[2] != 1:
        return side.run(call)
    image, grid = call.args[:2]
    return call.op(side.of(image), side.convert(grid), *call.args[2:])


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


@rule("_amp_foreach_non_finite_check_and_unscale_")
def _unscale(call: Call, side: Side) -> Any:
    """Gradients are unscaled; whether one is infinite is a decision."""
    gradients, found_inf, inverse = call.args[:3]
    factor = side.of(inverse)
    for gradient in gradients:
        side.of(gradient).mul_(factor)
    side.of(found_inf).copy_(found_inf)
    return None


@rule("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
def _fused_step(call: Call, side: Side) -> Any:
    """The kernels read the scale and the decision of a `GradScaler` as float32: those of the run."""
    scaler: dict[str, Any] = {name: call.kwargs[name] for name in ("grad_scale", "found_inf") if name in call.kwargs}
    return side.run(call, lambda *args, **kwargs: call.op(*args, **(kwargs | scaler)))
