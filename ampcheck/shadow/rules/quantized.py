"""Products with matrices in a quantized format, which are unpacked."""

from __future__ import annotations

from typing import Any

import torch

from ampcheck.shadow.call import Call, Side, leaves
from ampcheck.shadow.rules.registry import rule


@rule("_weight_int8pack_mm")
def _int8(call: Call, side: Side) -> Any:
    """A product with a matrix of int8 and a scale per row of it."""
    x, weight, scales = call.args
    return side.of(x) @ weight.to(side.dtype).t() * side.of(scales)


@rule("_weight_int4pack_mm_for_cpu")
def _int4(call: Call, side: Side) -> Any:
    """A product with a packed matrix, which is what the kernel makes of the unit matrix."""
    x, packed, group, scales = call.args
    unit = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    return side.of(x) @ side.convert(call.op(unit, packed, group, scales))


@rule(
    "fake_quantize_per_tensor_affine_cachemask", "fake_quantize_per_channel_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", own=True,
)  # fmt: skip
def _fake_quantized(call: Call, side: Side) -> Any:
    """The nearest multiple of a scale between two ends, and which elements lie between them."""
    x = side.of(call.args[0])
    scale, zero = (side.lift(value) for value in call.args[1:3])
    if "channel" in call.name:
        layout = [-1 if d == call.args[3] % x.dim() else 1 for d in range(x.dim())]
        scale, zero = scale.view(layout), zero.view(layout)
    whole = (x / scale).round() + zero
    low, high = (call.argument(name) for name in ("quant_min", "quant_max"))
    return [(whole.clamp(low, high) - zero) * scale, None]


@rule("_scaled_mm", "_scaled_mm_v2")
def _scaled(call: Call, side: Side) -> Any:
    """A product of float8 matrices with a scale for all, one per row and one per column, or lists of such."""
    if any(call.argument("swizzle_a") or ()) or any(call.argument("swizzle_b") or ()):
        raise NotImplementedError("scales in a swizzled layout")
    a, b = (side.of(t) for t in call.args[:2])
    for scale in leaves(call.argument("scale_a")):
        a = a * _blocks(side.of(scale), a)
    for scale in leaves(call.argument("scale_b")):
        b = b * _blocks(side.of(scale), b)
    bias, scale = call.argument("bias"), call.argument("scale_result")
    result = a @ b if bias is None else a @ b + side.of(bias)
    return result if scale is None else result * side.of(scale)


def _blocks(scale: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Scales of blocks as scales of elements; scales that a matrix broadcasts with are left alone."""
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() != 2:
        raise NotImplementedError(f"scales of shape {list(scale.shape)}")
    for dim in (0, 1):
        if scale.shape[dim] not in (1, matrix.shape[dim]):
            scale = scale.repeat_interleave(-(-matrix.shape[dim] // scale.shape[dim]), dim)
            scale = scale.narrow(dim, 0, matrix.shape[dim])
    return scale
