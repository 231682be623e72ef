"""The readable oracle: plain torch, every magnitude in float64, one call per statistic. Slow and correct.

It judges the fast implementations in the tests and replaces them where they cannot run.
"""

from __future__ import annotations

import math

import torch

from ampcheck.health.plan import Plan


def pack(tensor: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return the packed vector (float64, ``plan.width`` elements, on the tensor's device) without synchronising.

    ``tensor`` is real, strided and of ``plan.carrier``. Float32 and bfloat16 subnormals are lost where the thread
    flushes them (``torch.set_flush_denormal``): the caller checks that.
    """
    wide = tensor.to(torch.float64).abs()
    finite = wide.isfinite()
    present = finite & (wide > 0)
    amax, amin = wide.new_zeros(()), wide.new_full((), math.inf)
    if wide.numel():
        amax, amin = torch.where(finite, wide, 0.0).amax(), torch.where(present, wide, math.inf).amin()
    counts = [
        wide == 0,
        wide < plan.smallest_normal,
        finite,
        ~wide.isnan(),
    ]
    statistics = [*(mask.sum() for mask in counts), amax, amin, torch.where(finite, wide, 0.0).square().sum()]
    packed = torch.stack([value.to(torch.float64) for value in statistics])
    return torch.cat([packed, _histogram(wide, present, plan.exponents)]) if plan.histogram else packed


def _histogram(wide: torch.Tensor, present: torch.Tensor, exponents: range) -> torch.Tensor:
    _, exponent = torch.frexp(wide)  # |x| = m * 2**exponent with m in [0.5, 1)
    bins = torch.where(present, exponent - 1 - exponents.start, len(exponents)).flatten()  # the last one is dropped
    counts = wide.new_zeros(len(exponents) + 1)  # bincount would synchronise
    return counts.scatter_add_(0, bins.to(torch.int64), torch.ones_like(wide).flatten())[:-1]
