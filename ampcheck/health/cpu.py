"""The CPU path: NumPy on the bits of the values.

The bits of a float without its sign, read as an integer, rise with its magnitude. Counts and extremes are therefore
comparisons of integers, which a thread that flushes subnormals (``torch.set_flush_denormal``) does not change; only the
sum of squares converts, to float64, where no square of a float32 overflows. NumPy is what reads memory through a
pointer: neither Dynamo nor a dispatch mode sees it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ampcheck.core.formats import FloatFormat
from ampcheck.health.plan import AMAX, AMIN, Plan

_CHUNK = 1 << 17
"""Elements that are read at a time: their temporary arrays stay in the second-level cache."""

_TO_FLOAT32 = {"bfloat16": (16, 1.0), "float16": (13, 2.0**112)}
"""By which shift the bits of a narrower format become those of a float32, and the factor between the exponents."""

_Bits = npt.NDArray[Any]


def pack(tensor: torch.Tensor, plan: Plan) -> Sequence[float]:
    """Return the packed vector of a dense tensor whose dtype is ``plan.carrier``. Its strides may be permuted."""
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr()))
    bits = memory.view(f"u{tensor.element_size()}")
    with np.errstate(over="ignore", under="ignore"):  # squares of float64
        chunks = [_pack(bits[start : start + _CHUNK], plan) for start in range(0, max(len(bits), 1), _CHUNK)]
        if len(chunks) == 1:
            return chunks[0]
        table = np.array(chunks)
        packed: list[float] = table.sum(0).tolist()
    packed[AMAX], packed[AMIN] = table[:, AMAX].max(), table[:, AMIN].min()
    return packed


def _pack(bits: _Bits, plan: Plan) -> list[float]:
    form, word = plan.format, bits.dtype.type
    codes = bits & word((1 << (form.bits - 1)) - 1)
    infinity, implicit = form.encode(math.inf), 1 << form.mantissa_bits
    least, most = (int(codes.min()), int(codes.max())) if len(codes) else (infinity, 0)
    finite, numbers = codes, len(codes)
    if most >= infinity:
        finite, numbers = codes[codes < word(infinity)], int(np.count_nonzero(codes <= word(infinity)))
        most = int(finite.max(initial=0))
    zeros = below_normal = 0
    if least < plan.normal_code:
        zeros = len(codes) - int(np.count_nonzero(codes))
        below_normal = int(np.count_nonzero(codes < word(plan.normal_code)))
        least = int((finite - word(1)).min()) + 1 if zeros else least  # zero wraps and is the largest
    present = 0 < least < infinity and most > 0
    subnormal = present and least < implicit
    packed = [
        zeros,
        below_normal,
        len(finite),
        numbers,
        _value(most, form),
        _value(least, form) if present else math.inf,
        _sum_of_squares(finite, form, subnormal),
    ]
    if plan.histogram:
        low = codes[(codes > 0) & (codes < word(implicit))] if subnormal else codes[:0]
        exponents = np.frexp(low.astype(np.float64))[1] - 1
        packed += np.bincount(exponents, minlength=form.mantissa_bits).tolist()
        packed += np.bincount(codes >> word(form.mantissa_bits), minlength=1 << form.exponent_bits)[1:-1].tolist()
    return packed


def _sum_of_squares(codes: _Bits, form: FloatFormat, subnormal: bool) -> float:
    """Of finite values, given by their bits without sign; subnormal: whether there are subnormal ones among them."""
    if form.bits == 64:
        return _dot(codes.view(np.float64))
    shift, factor = _TO_FLOAT32.get(form.name, (0, 1.0))
    narrow = codes.astype(np.uint32) << np.uint32(shift) if shift else codes
    wide = narrow.view(np.float32).astype(np.float64)
    if subnormal:  # from their integers, as a thread that flushes them reads the float32 as zero
        low = codes < 1 << form.mantissa_bits
        wide[low] = codes[low].astype(np.float64) * (form.smallest_subnormal / factor)
    return _dot(wide) * factor**2


def _dot(values: _Bits) -> float:
    return float(np.einsum("i,i->", values, values))  # BLAS would start its threads


def _value(code: int, form: FloatFormat) -> float:
    """The finite value of a code, whether or not the thread flushes subnormals."""
    if form.bits == 64:
        return float(np.uint64(code).view(np.float64))
    exponent, fraction = divmod(code, 1 << form.mantissa_bits)
    implicit = bool(exponent) << form.mantissa_bits
    return math.ldexp(fraction + implicit, max(exponent, 1) - 1 + form.min_exponent - form.mantissa_bits)
