"""The CUDA path: one pass of a Triton kernel, and a second, tiny one that adds up what its programs found.

As on the CPU, the bits without the sign rise with the magnitude, so that counts and extrema are integer operations;
squares are float64. The kernels are queued and nothing waits, except for the first use of a plan on a device, which
copies its limits there. Importing this module imports Triton.
"""

# Triton's language is dynamic: its functions cannot be annotated.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from ampcheck.health.plan import Plan, plan_for

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_WARPS = 8
_OPTIONS = {"num_warps": _WARPS, "enable_fp_fusion": True}  # said aloud, since Triton 3.9 warns of its default
_PROGRAMS_PER_PROCESSOR = 8


@triton.jit
def _value(code, MANTISSA: tl.constexpr):
    """Return finite codes as float64. The mantissa's width tells the formats apart."""
    if MANTISSA == 52:
        value = code.to(tl.float64, bitcast=True)
    elif MANTISSA == 23:
        value = code.to(tl.float32, bitcast=True).to(tl.float64)
    elif MANTISSA == 7:
        value = (code << 16).to(tl.float32, bitcast=True).to(tl.float64)
    else:
        value = code.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.float64)
    return value


@triton.jit
def _partial(
    words, limits, out, numel, INF: tl.constexpr, TOP: tl.constexpr, MANTISSA: tl.constexpr, COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write this program's column of ``out``, float64 [COUNTS + 3, programs]: counts, amax, amin, sum of squares."""
    lane = tl.arange(0, BLOCK)[None, :]
    limit = tl.load(limits + tl.arange(0, COUNTS))[:, None]
    below = tl.zeros((COUNTS, BLOCK), tl.int32)
    amax = tl.zeros((1, BLOCK), limits.dtype.element_ty)
    amin = amax + TOP  # the code less one, so that zero, wrapped, is the largest
    squares = tl.zeros((1, BLOCK), tl.float64)
    programs = tl.num_programs(0).to(tl.int64)
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, numel, programs * BLOCK, num_stages=4):
        inside = start + lane < numel
        # Past the load everything is at least 32 bits wide, as the limits are: the registers are too.
        code = tl.load(words + start + lane, mask=inside, other=0).to(limits.dtype.element_ty) & TOP
        below += ((code < limit) & inside).to(tl.int32)
        code = tl.where(code < INF, code, 0)
        amax = tl.maximum(amax, code)
        amin = tl.minimum(amin, (code - 1) & TOP)
        value = _value(code, MANTISSA)
        squares += value * value
    column = out + tl.program_id(0)
    row = tl.arange(0, COUNTS)
    tl.store(column + row * programs, tl.sum(below.to(tl.int64), axis=1).to(tl.float64))
    last = COUNTS + tl.arange(0, 1)
    low = tl.min(amin, axis=1)
    smallest = tl.where(low < INF, _value(tl.minimum(low, INF) + 1, MANTISSA), float("inf"))
    tl.store(column + last * programs, _value(tl.max(amax, axis=1), MANTISSA))
    tl.store(column + (last + 1) * programs, smallest)
    tl.store(column + (last + 2) * programs, tl.sum(squares, axis=1))


@triton.jit
def _total(partial, packed, programs, wanted, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Reduce one row of ``partial``: the counts that are wanted, then amax, amin and the sum of squares."""
    target = tl.program_id(0)
    row = target
    if target >= wanted:
        row = COUNTS + target - wanted
    column = tl.arange(0, BLOCK)
    inside = column < programs
    values = tl.load(partial + row * programs + column, mask=inside, other=0.0)
    if row == COUNTS:
        result = tl.max(values, axis=0)
    elif row == COUNTS + 1:
        result = tl.min(tl.where(inside, values, float("inf")), axis=0)
    else:
        result = tl.sum(values, axis=0)
    tl.store(packed + target, result)


@triton.jit
def _histogram(words, bins, numel, MANTISSA: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """Add to ``bins``, int64: MANTISSA of them for the subnormals, then one for each exponent field of the normals."""
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros((FIELDS,), tl.int64)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, numel, tl.num_programs(0).to(tl.int64) * BLOCK):
        code = tl.load(words + start + lane, mask=start + lane < numel, other=0)
        field = (code >> MANTISSA).to(tl.int32) & (FIELDS - 1)
        counts += tl.histogram(field, FIELDS).to(tl.int64)
        # Subnormals are rare: one atomic operation each. As a float64 its mantissa tells floor(log2()) itself.
        mantissa = (code & ((1 << MANTISSA) - 1)).to(tl.float64)
        exponent = (mantissa.to(tl.int64, bitcast=True) >> 52) - 1023
        tl.atomic_add(bins + exponent, 1, mask=(field == 0) & (mantissa > 0))
    field = tl.arange(0, FIELDS)
    tl.atomic_add(bins + MANTISSA - 1 + field, counts, mask=(field > 0) & (field < FIELDS - 1))


def pack(tensor: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return the packed vector (float64, on the tensor's device) of a dense tensor whose dtype is ``plan.carrier``."""
    numel, mantissa = tensor.numel(), plan.format.mantissa_bits
    words = torch.as_strided(tensor, (numel,), (1,)).view(_WORDS[tensor.element_size()])
    top = torch.iinfo(words.dtype).max
    inf = top >> mantissa << mantissa
    wanted = len(plan.code_limits)
    counts = triton.next_power_of_2(wanted)
    # Each thread loads 16 bytes at a time; many counts need the registers more.
    block = _WARPS * 32 * 16 // tensor.element_size() // max(1, counts // 8)
    programs = min(triton.cdiv(numel, block), _processors(tensor.device) * _PROGRAMS_PER_PROCESSOR) or 1
    with torch.cuda.device_of(tensor):
        partial = torch.empty((counts + 3, programs), dtype=torch.float64, device=tensor.device)
        packed = torch.empty(wanted + 3, dtype=torch.float64, device=tensor.device)
        limits = _limits(plan, counts, tensor.device)
        _partial[(programs,)](words, limits, partial, numel, inf, top, mantissa, counts, block, **_OPTIONS)
        _total[(wanted + 3,)](partial, packed, programs, wanted, counts, triton.next_power_of_2(programs), **_OPTIONS)
        if not plan.histogram:
            return packed
        bins = torch.zeros(len(plan.exponents), dtype=torch.int64, device=tensor.device)
        _histogram[(programs,)](words, bins, numel, mantissa, (inf >> mantissa) + 1, block, **_OPTIONS)
        return torch.cat([packed, bins.to(torch.float64)])


def alarm(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[amax, smallest nonzero magnitude]`` (float64, on the tensor's device) of a dense tensor."""
    packed = pack(tensor, plan_for(tensor.dtype, (), False))
    _, _, finite, numbers, amax, amin, _ = packed.unbind()
    amax = torch.where(finite < numbers, math.inf, amax)
    return torch.stack([torch.where(numbers < tensor.numel(), math.nan, amax), amin])


@functools.lru_cache(maxsize=256)
def _limits(plan: Plan, length: int, device: torch.device) -> torch.Tensor:
    codes = plan.code_limits
    word = torch.int64 if plan.carrier is torch.float64 else torch.int32
    return torch.tensor([*codes, *[0] * (length - len(codes))], dtype=word, device=device)


def _processors(device: torch.device) -> int:
    # Without a GPU this runs in Triton's interpreter.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
