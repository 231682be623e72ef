"""Ops whose floating results are decisions, or follow those of a `GradScaler`: companions take those of the run.

So are the sides of a kink on which values are. Forward is continuous there and needs no rule; its derivative jumps, and
one value that lies on the other side in exact would make a whole gradient look wrong.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ampcheck.facts.memory import finite, roundoff
from ampcheck.shadow.call import Call, Side
from ampcheck.shadow.rules.registry import restart, rule


@rule("histc", follows=True)
def _counted(call: Call, side: Side) -> Any:
    """The bins that the run chose; one that was counted to the end of the integers of its format stopped there."""
    wide: torch.Tensor = side.convert(call.out)
    if call.written:
        return restart(call, side)
    counts = call.op(call.args[0].double(), *call.args[1:], **call.kwargs).to(wide.dtype)
    return torch.where(wide >= 1 / roundoff(call.out.dtype), torch.maximum(counts, wide), wide)


@rule("sgn", "sgn_", follows=True)
def _direction(call: Call, side: Side) -> Any:
    """The sign of a real number is a decision; z / |z| of a complex one is none."""
    return side.run(call) if call.args[0].is_complex() else restart(call, side)


@rule("div", "div_", follows=True)
def _divide(call: Call, side: Side) -> Any:
    """A quotient; one that is rounded to an integer is a decision."""
    if call.argument("rounding_mode") is None:
        return side.run(call)
    return restart(call, side)


@rule("remainder", "fmod", "remainder_", "fmod_", follows=True)
def _remainder(call: Call, side: Side) -> Any:
    """Return what is left over after as many divisors as the run took away."""
    dividend, divisor = call.argument("self"), call.argument("other")
    before = dividend if call.kept is None else call.kept
    wide = (v.double() if isinstance(v, torch.Tensor) else v for v in (before, call.out, divisor))
    start, left, step = wide
    times = ((start - left) / step).round()
    times = times.to(side.dtype)
    result = side.lift(dividend) - times * side.lift(divisor)
    return torch.where(finite(call.out), result, side.convert(call.out))


@rule("frac", "frac_", follows=True)
def _fraction(call: Call, side: Side) -> Any:
    """Return what is left over after the integer that the run took away."""
    x = call.args[0]
    return side.of(x) - side.convert(x if call.kept is None else call.kept).trunc()


@rule("frexp", follows=True)
def _mantissa(call: Call, side: Side) -> Any:
    """The mantissa that belongs to the exponent of the run."""
    return [torch.ldexp(side.of(call.args[0]), -call.out[1]), None]


@rule("grid_sampler_2d", "grid_sampler_3d", follows=True)
def _sampled(call: Call, side: Side) -> Any:
    """Samples of an image; which pixel is the nearest one is a decision."""
    image, grid, mode, _, aligned = call.args
    if mode != 1:
        return side.run(call)
    return call.op(side.of(image), _between_pixels(side, image, grid, mode, aligned), *call.args[2:])


@rule("grid_sampler_2d_backward", "grid_sampler_3d_backward", "_grid_sampler_2d_cpu_fallback_backward", follows=True)
def _sampled_backward(call: Call, side: Side) -> Any:
    """Gradients of samples; the derivative of a linear one by a coordinate jumps at each pixel."""
    gradient, image, grid, mode, _, aligned = call.args[:6]
    place = side.of(grid) if mode == 2 else _between_pixels(side, image, grid, mode, aligned)
    return call.op(side.of(gradient), side.of(image), place, *call.args[3:], **call.kwargs)


def _between_pixels(side: Side, image: torch.Tensor, grid: torch.Tensor, mode: int, aligned: bool) -> torch.Tensor:
    """Coordinates from -1 to 1, as far inside as between, or around, the pixels that the run took.

    What lies a pixel away or further is no near tie, and stays.
    """
    places = []
    for exact, real, size in zip(side.of(grid).unbind(-1), grid.unbind(-1), reversed(image.shape[2:]), strict=True):
        scale, shift = (size - aligned) / 2 or 1.0, 0.0 if aligned else 0.5
        taken = (real + 1) * scale - shift  # as the kernels compute it, in the format of the run
        first = taken.round().to(exact.dtype) - 0.5 if mode == 1 else taken.floor().to(exact.dtype)
        pixel, inside = (exact + 1) * scale - shift, size * 2.0**-21
        place = pixel.clamp(first + inside, first + 1 - inside)
        turned = (place != pixel) & ((place - pixel).abs() < 1)
        places.append(torch.where(turned, (place + shift) / scale - 1, exact))
    return torch.stack(places, -1)


@rule(
    "threshold_backward", "leaky_relu_backward", "hardtanh_backward", "hardsigmoid_backward", "softshrink_backward",
    "hardshrink_backward", follows=True,
)  # fmt: skip
def _masked(call: Call, side: Side) -> Any:
    """The gradient times a number that depends on the side of the kink alone."""
    gradient, value = call.args[:2]
    return call.op(side.of(gradient), side.convert(value), *call.args[2:], **call.kwargs)


@rule("hardswish_backward", follows=True)
def _hardswish(call: Call, side: Side) -> Any:
    """0 below -3, the gradient above 3, between them the derivative of x (x + 3) / 6."""
    gradient, value = side.of(call.args[0]), call.args[1]
    inside = gradient * (side.of(value) / 3 + 0.5)
    return torch.where(value <= -3, gradient * 0, torch.where(value < 3, inside, gradient))


@rule("_prelu_kernel_backward", follows=True)
def _prelu(call: Call, side: Side) -> Any:
    """The gradients of the input and of the slopes."""
    gradient, value, weight = (side.of(t) for t in call.args)
    positive = call.args[1] > 0
    return [torch.where(positive, gradient, weight * gradient), torch.where(positive, gradient * 0, value * gradient)]


@rule("angle", follows=True)
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
