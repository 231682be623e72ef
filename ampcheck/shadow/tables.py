"""Tables of edges that 16 bits made coarser before the run: most of the bins between them cannot occur.

A module that is cast takes its edges along, and nothing is left of those in float32. Equal edges alone prove nothing:
tables are padded, and quantiles of whole numbers repeat. But where numbers next to each other in the format occur
several times each, and that over a power of two, where the spacing of the format doubles, it is the format that made
them equal: no data have its spacing. Values of the same format hit no more bins than that, and nothing is lost.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ampcheck.shadow.bounds import JUDGED_UNIT, Examination
from ampcheck.shadow.call import Call
from ampcheck.shadow.cause import fault_at, largest_of
from ampcheck.shadow.companions import CompanionStore, has_companions, roundoff
from ampcheck.shadow.faults import TABLE, Fault
from ampcheck.shadow.memory import dtype_name

_FEWEST = 16
"""Equal edges between two powers of two, and values in the bins at them, from which they are no chance."""

_MOST = 0.5
"""The share of the bins above which those that cannot occur are a fault."""


def coarse_table(call: Call, store: CompanionStore) -> Fault | None:
    """The bins of a table in 16 bits that cannot occur, as a fault, where finer values are looked up in them."""
    if call.name not in ("bucketize", "searchsorted"):
        return None
    edges, values = call.args[:2] if call.name == "searchsorted" else call.args[1::-1]
    if not (has_companions(edges) and has_companions(values)) or edges.dim() != 1 or edges.numel() <= _FEWEST:
        return None
    dtype = _format(edges, store.of(edges).unit)
    if dtype is None or store.of(values).unit >= JUDGED_UNIT or not bool((edges.diff() >= 0).all()):
        return None
    if not torch.equal(store.exact(edges), edges.double()):
        return None  # the run computed them: see its decisions
    numbers, group, times = edges.to(dtype).unique_consecutive(return_inverse=True, return_counts=True)
    crowded = _next_to_neighbours(numbers) & (times > 1)
    binades = torch.frexp(numbers.float()).exponent[crowded]
    lost, known = (times - 1)[crowded], set(binades.tolist())
    in_each = [int(lost[binades == binade].sum()) for binade in known]
    count, bins = sum(in_each), edges.numel() - 1
    if sum(number >= _FEWEST for number in in_each) < 2 or count <= _MOST * bins:
        return None
    at_crowded = torch.cat([crowded.new_zeros(1), crowded[group], crowded.new_zeros(1)])
    if int((at_crowded[call.out] | at_crowded[call.out + 1]).sum()) < _FEWEST:
        return None
    fault = fault_at(TABLE, call, edges, Examination(bins, error=count / bins))
    note = f"{dtype_name(dtype)} holds {numbers.numel():,} different numbers of the {edges.numel():,} edges"
    return replace(fault, elements=count, numel=bins, amax_in=largest_of(edges), note=note)


def _format(edges: torch.Tensor, unit: float) -> torch.dtype | None:
    """The format of 16 bits that holds the edges, the coarsest in their history; None without any."""
    formats = (dtype for dtype in (torch.float16, torch.bfloat16) if roundoff(dtype) == unit)
    return next((dtype for dtype in formats if torch.equal(edges.to(dtype).to(edges.dtype), edges)), None)


def _next_to_neighbours(numbers: torch.Tensor) -> torch.Tensor:
    """Which of ascending numbers of 16 bits have the next numbers of the format on both sides; one at the ends."""
    bits = numbers.view(torch.int16).int()
    steps = torch.where(bits < 0, -(bits & 0x7FFF), bits).diff() == 1
    end = steps.new_ones(1)
    return torch.cat([end, steps]) & torch.cat([steps, end]) & numbers.isfinite()
