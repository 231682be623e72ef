"""Emulated casts: a tensor in the values that a format with scales leaves of it, in float32.

Bit for bit what the casts of torchao and DeepGEMM give on a CPU, elements and scales; a tensor of zeros is zeros here,
where torchao's `nvfp4_quantize` divides zero by zero, and so are zeros beside values below 1e-35.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.whatif.recipes import ALL, Operand

_FLOAT32_EXPONENT = 0x7F800000
_LARGEST = torch.finfo(torch.float32).max
_E4M3 = format_of("float8_e4m3fn")


class Cast(NamedTuple):
    """Result of a cast: values, in float32, and the parts of nonzero elements that saturated and that became zero."""

    values: torch.Tensor
    saturated: float = 0.0
    flushed: float = 0.0


class _Scale(NamedTuple):
    """The factor of each block before rounding, and that by which the rounded values are multiplied afterwards; None
    where they are divided by the first."""

    factor: torch.Tensor
    back: torch.Tensor | None


def rounded(x: torch.Tensor, to: FloatFormat, generator: torch.Generator | None = None) -> torch.Tensor:
    """Float32 values rounded to a format, to nearest and ties to even, with saturation; NaN stays.

    generator: rounds up with the probability of the distance instead. The format must be narrower than float32.
    """
    x = x.clamp(-to.max, to.max)
    binade = (x.view(torch.int32) & _FLOAT32_EXPONENT).view(torch.float32)
    ulp = binade.clamp(min=to.smallest_normal) * 2.0**-to.mantissa_bits
    steps = x / ulp  # exact: by a power of two
    if generator is None:
        return torch.round(steps) * ulp
    up = torch.rand(steps.shape, generator=generator, device=steps.device)
    return (torch.floor(steps + up) * ulp).clamp(-to.max, to.max)


def cast(
    x: torch.Tensor,
    operand: Operand,
    *,
    amax: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    shares: bool = False,
) -> Cast:
    """A tensor of shape (rows, inner) as an operand holds it.

    amax: of earlier calls, in place of its own. generator: for stochastic rounding and the signs of a Hadamard
    transform, equal ones for both operands. shares: count what saturates and what becomes zero.
    """
    if not x.numel():
        return Cast(x.float())
    blocks = in_blocks(x.float(), operand.block)
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True) if amax is None else amax.float().expand(1, 1, 1, 1)
    factor, back = _SCALES[operand.scale](largest.clamp(min=operand.least), operand.element)
    scaled = blocks * factor
    elements = rounded(scaled, operand.element, generator if operand.stochastic else None)
    values = elements / factor if back is None else elements * back
    saturated = flushed = 0.0
    if shares and (nonzero := int(blocks.count_nonzero())):
        saturated = float((scaled.abs() >= operand.element.overflows_at).sum()) / nonzero
        flushed = float(((elements == 0) & (blocks != 0)).sum()) / nonzero
    rows, _, columns, _ = blocks.shape
    whole = values.reshape(rows * blocks.shape[1], columns * blocks.shape[3])
    return Cast(whole[: x.shape[0], : x.shape[1]], saturated, flushed)


def in_blocks(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """A matrix as (blocks down, rows of a block, blocks across, elements of a row), padded with zeros."""
    rows, inner = (size if wanted == ALL else wanted for size, wanted in zip(x.shape, block, strict=True))
    down, across = -(-x.shape[0] // max(rows, 1)), -(-x.shape[1] // max(inner, 1))
    padded = torch.nn.functional.pad(x, (0, across * inner - x.shape[1], 0, down * rows - x.shape[0]))
    return padded.reshape(down, rows, across, inner)


def transformed(x: torch.Tensor, length: int, generator: torch.Generator) -> torch.Tensor:
    """Each `length` elements of the inner dimension with random signs, by an orthogonal Hadamard matrix; padded."""
    matrix = torch.ones(1, 1)
    while len(matrix) < length:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (length,), generator=generator) * 2.0 - 1.0
    rotation = (signs[:, None] * matrix / length**0.5).to(x.device)
    blocks = in_blocks(x.float(), (1, length))
    return torch.matmul(blocks, rotation).reshape(len(x), -1)


# Scales of blocks, from their amax ------------------------------------------------------------------------------------


def _float32(amax: torch.Tensor, to: FloatFormat) -> _Scale:
    """The quotient in float64, rounded once, and finite, as TransformerEngine keeps it for the smallest amax."""
    factor = (to.max / amax.double()).float().clamp(max=_LARGEST)
    return _Scale(torch.where(amax == 0, 1.0, factor), None)


def _power_of_two(amax: torch.Tensor, to: FloatFormat) -> _Scale:
    """By the logarithm in float32, as torchao does it, which rounds up where a quotient is all but a power of two."""
    exponent = torch.floor(torch.log2(_float32(amax, to).factor))
    return _Scale(torch.exp2(exponent.clamp(max=127)), None)


def _reciprocal(amax: torch.Tensor, to: FloatFormat) -> _Scale:
    back = amax / to.max
    return _Scale(1.0 / back, back)


def _e8m0(amax: torch.Tensor, exponent: torch.Tensor) -> _Scale:
    """Powers of two from 2**-127 to 2**127; NaN where the amax is not finite."""
    exponent = torch.where(amax.isfinite(), exponent.clamp(-127, 127).double(), torch.nan)
    return _Scale(torch.exp2(-exponent).float(), torch.exp2(exponent).float())


def _e8m0_floor(amax: torch.Tensor, to: FloatFormat) -> _Scale:
    return _e8m0(amax, _exponent(amax) - _exponent(torch.tensor(to.max)))


def _e8m0_ceil(amax: torch.Tensor, to: FloatFormat) -> _Scale:
    quotient = amax * torch.tensor(1.0 / to.max)
    fraction = quotient.view(torch.int32) & ~_FLOAT32_EXPONENT
    subnormal = quotient < torch.finfo(torch.float32).tiny
    up = torch.where(subnormal, fraction > 0x400000, fraction != 0)  # 2**-127 is a subnormal of float32
    return _e8m0(amax, _exponent(quotient) + up)


def _exponent(x: torch.Tensor) -> torch.Tensor:
    """The exponent of float32 values, -127 of zero and subnormals."""
    return ((x.view(torch.int32) >> 23) & 0xFF) - 127


def _e4m3(amax: torch.Tensor, to: FloatFormat) -> _Scale:
    """Two levels: a float32 scale of the tensor, and e4m3 ones relative to it, of at least e4m3's smallest normal."""
    whole = amax.max() / (_E4M3.max * to.max)
    return _within(torch.where(whole == 0, 1.0, whole), amax, to)


def _e4m3_alone(amax: torch.Tensor, to: FloatFormat) -> _Scale:
    return _within(torch.ones(()), amax, to)


def _within(whole: torch.Tensor, amax: torch.Tensor, to: FloatFormat) -> _Scale:
    of_block = rounded((amax / to.max / whole).clamp(min=_E4M3.smallest_normal), _E4M3)
    return _Scale(((1.0 / whole) / of_block).clamp(max=_LARGEST), whole * of_block)


_SCALES: Mapping[str, Callable[[torch.Tensor, FloatFormat], _Scale]] = {
    "float32": _float32,
    "power of two": _power_of_two,
    "reciprocal": _reciprocal,
    "e8m0 floor": _e8m0_floor,
    "e8m0 ceil": _e8m0_ceil,
    "e4m3": _e4m3,
    "e4m3 alone": _e4m3_alone,
}
