"""Emulated casts beside those of torchao and DeepGEMM on a CPU, bit for bit.

    PYTHONPATH=.:AO python benchmarks/whatif_casts.py [--deepgemm deep_gemm/utils/math.py] [--json FILE]

Of each cast 1.2 million values: normal numbers of one size and over 50 binades, zeros, subnormals, any bits, and blocks
with infinities and NaN. Products of tensorwise operands beside `torch._scaled_mm`.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _evidence import write_evidence
from torchao.float8.float8_utils import ScalingGranularity, tensor_to_scale, to_fp8_saturated
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

from ampcheck.core.environment import installed
from ampcheck.whatif import RECIPES, Operand
from ampcheck.whatif.casts import cast

Reference = Callable[[torch.Tensor, Operand], torch.Tensor]


def values(seed: int, kind: str, count: int = 98304) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int) -> torch.Tensor:
        return torch.randint(low, high, (size,), generator=generator)

    x = torch.randn(count, generator=generator)
    if kind != "one size":
        x = torch.ldexp(x, draw(-30, 20, count))
    for zero in (0.0, -0.0):
        x[draw(0, count, count // 50)] = zero
    any_bits = draw(-(2**31), 2**31 - 1, count // 20).to(torch.int32).view(torch.float32)
    any_bits = any_bits[any_bits.isfinite() & (any_bits.abs() < 1e30)]
    subnormal = draw(1, 0x7FFFFF, count // 50).to(torch.int32).view(torch.float32)
    for special in (any_bits, subnormal):
        x[draw(0, count, len(special))] = special
    if kind == "not finite":
        x[3000], x[7000], x[9000] = math.inf, -math.inf, math.nan
    return x.view(-1, 1024)


def float8(granularity: ScalingGranularity, dim: int | None) -> Reference:
    def reference(x: torch.Tensor, operand: Operand) -> torch.Tensor:
        dtype, power = getattr(torch, operand.format), operand.scale == "power of two"
        options: dict[str, Any] = {"scaling_granularity": granularity, "axiswise_dim": dim}
        scale = tensor_to_scale(x, dtype, round_scales_to_power_of_2=power, **options)
        return to_fp8_saturated(x.float() * scale, dtype).float() / scale

    return reference


def microscaling(mode: ScaleCalculationMode) -> Reference:
    def reference(x: torch.Tensor, operand: Operand) -> torch.Tensor:
        dtype = getattr(torch, operand.format.replace("e2m1fn", "e2m1fn_x2"))
        scale, data = to_mx(x, dtype, 32, mode)
        return to_dtype(data, scale, dtype, 32, torch.float32)

    return reference


def nvfp4(x: torch.Tensor, operand: Operand) -> torch.Tensor:
    whole = per_tensor_amax_to_scale(x.abs().max()) if operand.scale == "e4m3" else None
    scale, data = nvfp4_quantize(x, per_tensor_scale=whole)
    elements = f4_unpacked_to_f32(unpack_uint4(data)).view(len(x), -1, 16)
    back = scale.float() if whole is None else whole * scale.float()
    return (elements * back.unsqueeze(-1)).view(x.shape)


def deepgemm(file: str, name: str) -> Reference:
    spec = importlib.util.spec_from_file_location("deepgemm_math", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def reference(x: torch.Tensor, operand: Operand) -> torch.Tensor:
        data, scale = getattr(module, name)(x, use_ue8m0=False)
        scale = scale.repeat_interleave(128, 1)
        return data.float() * (scale if operand.block[0] == 1 else scale.repeat_interleave(128, 0)[: len(x)])

    return reference


def cases(file: str | None) -> Iterator[tuple[str, Operand, Reference]]:
    tensor, rows = float8(ScalingGranularity.TENSORWISE, None), float8(ScalingGranularity.AXISWISE, -1)
    floor, ceil = microscaling(ScaleCalculationMode.FLOOR), microscaling(ScaleCalculationMode.RCEIL)
    operand = {name: (recipe.forward or ())[0] for name, recipe in RECIPES.items()}
    mx = operand["mxfp8"]
    yield "torchao, tensorwise e4m3", operand["tensorwise"], tensor
    yield "torchao, tensorwise e5m2", replace(operand["tensorwise"], format="float8_e5m2"), tensor
    yield "torchao, tensorwise e4m3, power of two", replace(operand["tensorwise"], scale="power of two"), tensor
    yield "torchao, rowwise e4m3, power of two", operand["rowwise"], rows
    yield "torchao, MX e4m3, up", mx, ceil
    yield "torchao, MX e4m3, down", replace(mx, scale="e8m0 floor"), floor
    yield "torchao, MX e5m2, up", replace(mx, format="float8_e5m2"), ceil
    yield "torchao, MX e5m2, down", replace(mx, format="float8_e5m2", scale="e8m0 floor"), floor
    yield "torchao, MX e2m1, down", operand["mxfp4"], floor
    yield "torchao, NVFP4", operand["nvfp4"], nvfp4
    yield "torchao, NVFP4 of one level", replace(operand["nvfp4"], scale="e4m3 alone"), nvfp4
    if file is not None:
        weight = (RECIPES["blockwise"].forward or ())[1]
        yield "DeepGEMM, 1 x 128 e4m3", operand["blockwise"], deepgemm(file, "per_token_cast_to_fp8")
        yield "DeepGEMM, 128 x 128 e4m3", weight, deepgemm(file, "per_block_cast_to_fp8")


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    return int(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).sum())


def compare(name: str, operand: Operand, reference: Reference) -> dict[str, Any]:
    equal = count = 0
    for seed in range(4):
        for kind in ("one size", "50 binades", "not finite"):
            x = values(seed, kind)
            if "NVFP4" in name or "DeepGEMM" in name:  # these say nothing of what is not finite
                x = x.nan_to_num(0.0, 1e30, -1e30)
            equal, count = equal + equal_bits(cast(x, operand).values, reference(x, operand)), count + x.numel()
    return {"cast": name, "equal": equal, "values": count}


def products() -> dict[str, Any]:
    """Tensorwise products: the largest distance over the largest value, and how many are the same in bfloat16."""
    worst, same, count = 0.0, 0, 0
    first, second = RECIPES["tensorwise"].forward or ()
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        a, b = (torch.randn(64, 256, generator=generator) for _ in range(2))
        ours = cast(a, first).values @ cast(b, second).values.T
        factors = [tensor_to_scale(x, torch.float8_e4m3fn) for x in (a, b)]
        codes = [to_fp8_saturated(x * factor, torch.float8_e4m3fn) for x, factor in zip((a, b), factors, strict=True)]
        scales = [factor.reciprocal() for factor in factors]
        theirs = torch._scaled_mm(codes[0], codes[1].T, *scales, out_dtype=torch.float32)
        worst = max(worst, float((ours - theirs).abs().max() / theirs.abs().max()))
        same, count = same + int((ours.bfloat16() == theirs.bfloat16()).sum()), count + ours.numel()
    return {"largest distance": worst, "equal in bfloat16": same, "values": count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepgemm", metavar="FILE")
    parser.add_argument("--torchao", default=installed("torchao"), metavar="VERSION", help="as the evidence names it")
    parser.add_argument("--json", type=Path, default=Path("reports/evidence/whatif_casts.json"))
    options = parser.parse_args()
    rows = [compare(*case) for case in cases(options.deepgemm)]
    product = products()
    lines = [f"torchao {options.torchao}. " + (__doc__ or "").split("\n\n")[2].replace("\n", " ").strip(), ""]
    lines += ["| cast | values | equal bits |", "|---|---|---|"]
    lines += [f"| {row['cast']} | {row['values']:,} | {row['equal']:,} |" for row in rows]
    apart, same = product["largest distance"], product["equal in bfloat16"]
    lines += ["", f"`torch._scaled_mm`: {product['values']:,} sums of 256 products, at most {apart:.1g} of the largest "
              f"apart in float32; {same:,} are equal in bfloat16."]  # fmt: skip
    write_evidence(options.json, {"torchao": options.torchao, "casts": rows, "products": product}, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
