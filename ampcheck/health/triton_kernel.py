"""The CUDA path: one pass of a Triton kernel, and a second, tiny one that reduces the results of its programs.

As on the CPU, the bits without the sign rise with the magnitude, so that counts and extrema are integer operations;
squares are float64. The kernels are queued and nothing waits, except for the first use of a plan on a device, which
copies its limits there. Importing this module imports Triton.
"""

# Triton's language is dynamic: its functions cannot be annotated.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ampcheck.health.plan import Plan

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_WARPS = 8
_OPTIONS = {"num_warps": _WARPS, "enable_fp_fusion": True}  # explicit, since Triton 3.9 warns of its default
_PROGRAMS_PER_PROCESSOR = 8


@triton.jit
def _value(code, MANTISSA: tl.constexpr):
    """Return finite codes as float64. The mantissa's width determines the format."""
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
    """Write this program's column of ``out``, float64 [COUNTS + 5, programs].

    The rows: magnitudes below each limit, infinities and NaNs, NaNs, amax, amin, sum of squares.
    """
    UNSIGNED: tl.constexpr = tl.uint64 if MANTISSA == 52 else tl.uint32
    lane = tl.arange(0, BLOCK)[None, :]
    limit = tl.load(limits + tl.arange(0, COUNTS))[:, None]
    below = tl.zeros((COUNTS, BLOCK), tl.int32)
    amax = tl.zeros((1, BLOCK), limits.dtype.element_ty)
    amin = (amax - 1).to(UNSIGNED, bitcast=True)  # the code less one, so that zero, wrapped, is the largest
    squares = tl.zeros((1, BLOCK), tl.float64)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    programs = tl.num_programs(0).to(tl.int64)
    for start in tl.range(first, numel, programs * BLOCK, num_stages=4):
        # Past the load everything is at least 32 bits wide, as the limits are: the registers are too. What is masked
        # off is zero, and taken from the counts in the end.
        code = tl.load(words + start + lane, mask=start + lane < numel, other=0).to(limits.dtype.element_ty) & TOP
        # The sign of the difference: two instructions a count, where a compare takes three (ptxas 12 for sm_90).
        below += ((code - limit).to(UNSIGNED, bitcast=True) >> (63 if MANTISSA == 52 else 31)).to(tl.int32)
        amax = tl.maximum(amax, code)
        amin = tl.minimum(amin, (code - 1).to(UNSIGNED, bitcast=True))
        value = _value(code, MANTISSA)
        squares += value * value
    highest = tl.max(amax)
    total = tl.sum(squares)
    infs_and_nans = (highest * 0).to(tl.int64)
    nans = infs_and_nans
    if highest >= INF:
        # Rare: a second pass without the infinities and NaNs.
        many = tl.zeros((1, BLOCK), tl.int32)
        some = tl.zeros((1, BLOCK), tl.int32)
        amax = tl.zeros((1, BLOCK), limits.dtype.element_ty)
        squares = tl.zeros((1, BLOCK), tl.float64)
        for start in tl.range(first, numel, programs * BLOCK):
            code = tl.load(words + start + lane, mask=start + lane < numel, other=0).to(limits.dtype.element_ty) & TOP
            many += (code >= INF).to(tl.int32)
            some += (code > INF).to(tl.int32)
            code = tl.where(code < INF, code, 0)
            amax = tl.maximum(amax, code)
            value = _value(code, MANTISSA)
            squares += value * value
        highest = tl.max(amax)
        total = tl.sum(squares)
        infs_and_nans = tl.sum(many.to(tl.int64))
        nans = tl.sum(some.to(tl.int64))
    column = out + tl.program_id(0)
    tl.store(column + tl.arange(0, COUNTS) * programs, tl.sum(below.to(tl.int64), axis=1).to(tl.float64))
    column += COUNTS * programs
    tl.store(column, infs_and_nans.to(tl.float64))
    tl.store(column + programs, nans.to(tl.float64))
    tl.store(column + 2 * programs, _value(highest, MANTISSA))
    lowest = tl.min(amin)
    smallest = _value((tl.minimum(lowest, INF) + 1).to(limits.dtype.element_ty, bitcast=True), MANTISSA)
    tl.store(column + 3 * programs, tl.where(lowest < INF - 1, smallest, float("inf")))
    tl.store(column + 4 * programs, total)


@triton.jit
def _total(partial, packed, programs, numel, padding, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Reduce ``partial`` to one element of: two counts, finite, not NaN, amax, amin, sum of squares."""
    target = tl.program_id(0)
    row = target
    if target >= 2:
        row = COUNTS + target - 2
    column = tl.arange(0, BLOCK)
    inside = column < programs
    values = tl.load(partial + row * programs + column, mask=inside, other=0.0)
    result = tl.sum(values, axis=0)
    if row < COUNTS:
        result -= padding
    elif row < COUNTS + 2:
        result = numel - result
    elif row == COUNTS + 2:
        result = tl.max(values, axis=0)
    elif row == COUNTS + 3:
        result = tl.min(tl.where(inside, values, float("inf")), axis=0)
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
        # Subnormals are rare: one atomic operation each. As a float64 its mantissa gives floor(log2()).
        mantissa = (code & ((1 << MANTISSA) - 1)).to(tl.float64)
        exponent = (mantissa.to(tl.int64, bitcast=True) >> 52) - 1023
        tl.atomic_add(bins + exponent, 1, mask=(field == 0) & (mantissa > 0))
    field = tl.arange(0, FIELDS)
    tl.atomic_add(bins + MANTISSA - 1 + field, counts, mask=(field > 0) & (field < FIELDS - 1))


def constants_of(plan: Plan) -> dict[str, int]:
    """Return the compile-time arguments of ``_partial`` for a plan."""
    size, mantissa = plan.carrier.itemsize, plan.format.mantissa_bits
    top = (1 << 8 * size - 1) - 1
    block = _WARPS * 32 * 16 // size  # each thread loads 16 bytes at a time
    return {"INF": top >> mantissa << mantissa, "TOP": top, "MANTISSA": mantissa, "COUNTS": 2, "BLOCK": block}


def pack(tensor: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return the packed vector (float64, on the tensor's device) of a dense tensor whose dtype is ``plan.carrier``."""
    numel, device, constants = tensor.numel(), tensor.device, constants_of(plan)
    mantissa, counts, block = constants["MANTISSA"], constants["COUNTS"], constants["BLOCK"]
    words = torch.as_strided(tensor, (numel,), (1,)).view(_WORDS[tensor.element_size()])
    blocks = triton.cdiv(numel, block)
    # Without a GPU this runs in Triton's interpreter.
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    programs = min(blocks, processors * _PROGRAMS_PER_PROCESSOR) or 1
    with torch.cuda.device_of(tensor):
        partial = torch.empty((counts + 5, programs), dtype=torch.float64, device=device)
        packed = torch.empty(plan.width - len(plan.exponents), dtype=torch.float64, device=device)
        _partial[(programs,)](words, _limits(plan, device), partial, numel, **constants, **_OPTIONS)
        padding, columns = blocks * block - numel, triton.next_power_of_2(programs)
        _total[(packed.numel(),)](partial, packed, programs, numel, padding, counts, columns, **_OPTIONS)
        if not plan.histogram:
            return packed
        bins = torch.zeros(len(plan.exponents), dtype=torch.int64, device=device)
        fields = (constants["INF"] >> mantissa) + 1
        _histogram[(programs,)](words, bins, numel, mantissa, fields, block, **_OPTIONS)
        return torch.cat([packed, bins.to(torch.float64)])


@functools.lru_cache(maxsize=256)
def _limits(plan: Plan, device: torch.device) -> torch.Tensor:
    word = torch.int64 if plan.carrier is torch.float64 else torch.int32
    return torch.tensor([1, plan.normal_code], dtype=word, device=device)  # infinity's are the kernel's own
