"""Collectives: how the companions of results follow from those that all ranks contribute."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ampcheck.shadow.call import floating_values
from ampcheck.shadow.norms import difference
from ampcheck.stream.ops import OpCall
from ampcheck.torchtools.process_groups import reduction_around

_FITS, _MISFITS = 0.02, 0.1
"""Relative deviations at which a reduction that cannot be read is taken for the one that ran, and a sum is not."""

Parts: TypeAlias = "list[torch.Tensor]"
Combine: TypeAlias = "Callable[[Sequence[Parts], Parts], Parts]"
"""The companions of the results, from those that each source gives, in order, and the real results."""


@dataclass(slots=True)
class Collective:
    """One collective on this rank. gives: tensors that it contributes; gets: those that it writes, None for those that
    the op returns. sources: the ranks of the group on which the results depend, as `combine` has them. rank:
    in the group. full: complete only when every rank has started it."""

    group: Any
    gives: Parts
    gets: Parts | None
    sources: Sequence[int]
    combine: Combine
    rank: int
    full: bool = True


def _reduced(call: OpCall, addends: Parts, real: torch.Tensor) -> torch.Tensor:
    """The reduction of a call; where it cannot be read a sum, or the one that gave the real result."""
    name = call.argument("reduce_op")
    if isinstance(name, str):
        return _REDUCTIONS[name.lower()](addends)
    reduction = reduction_around(sys._getframe())
    if reduction is not None:
        return _REDUCTIONS[reduction[0]](addends) * reduction[1]
    total = _REDUCTIONS["sum"](addends)
    misfit = _deviation(real, total) if real.shape == total.shape else 0.0
    if misfit <= _MISFITS:
        return total
    others = [_REDUCTIONS[other](addends) for other in ("avg", "min", "max", "product")]
    best = min(others, key=lambda other: _deviation(real, other))
    return best if _deviation(real, best) < _FITS else total


def _deviation(real: torch.Tensor, expected: torch.Tensor) -> float:
    apart, size = difference(real, expected)
    return apart / size if size else apart


_REDUCTIONS: dict[str, Callable[[Parts], torch.Tensor]] = {
    "sum": lambda addends: torch.stack(addends).sum(0),
    "avg": lambda addends: torch.stack(addends).mean(0),
    "product": lambda addends: torch.stack(addends).prod(0),
    "min": lambda addends: _first_or(torch.amin, addends),
    "max": lambda addends: _first_or(torch.amax, addends),
}


def _first_or(function: Callable[[torch.Tensor, int], torch.Tensor], addends: Parts) -> torch.Tensor:
    return addends[0] if addends[0].is_complex() else function(torch.stack(addends), 0)


def _plan(group: Any, gives: Any, gets: Any, combine: Combine, **more: Any) -> Collective:
    gets = None if gets is None else floating_values(gets)
    sources = more.pop("sources", range(group.size()))
    return Collective(group, floating_values(gives), gets, sources, combine, group.rank(), **more)


def _all_reduce(call: OpCall, group: Any) -> Collective:
    tensors = call.args[0]
    return _plan(group, tensors, tensors if _is_in_place(call) else None, _reducing(call))


def _is_in_place(call: OpCall) -> bool:
    return call.op.namespace == "c10d" or call.name.endswith("_")


def _reducing(call: OpCall) -> Combine:
    """Each result is the reduction of what the ranks give for it."""
    return lambda parts, real: [_reduced(call, [p[i] for p in parts], t) for i, t in enumerate(real)]


def _all_gather(call: OpCall, group: Any) -> Collective:
    """`allgather_`: lists of outputs, one list for each input."""

    def combine(parts: Sequence[Parts], real: Parts) -> Parts:
        return [part for of_input in zip(*parts, strict=True) for part in of_input]

    return _plan(group, call.args[1], call.args[0], combine)


def _all_gather_by_rank(call: OpCall, group: Any) -> Collective:
    """`allgather_coalesced_`: lists of outputs, one list for each rank."""
    return _plan(group, call.args[1], call.args[0], lambda parts, real: [part for p in parts for part in p])


def _all_gather_flat(call: OpCall, group: Any) -> Collective:
    """Outputs that hold the inputs of all ranks one after the other."""

    def combine(parts: Sequence[Parts], real: Parts) -> Parts:
        return [torch.cat([p[i].reshape(-1) for p in parts]).view(t.shape) for i, t in enumerate(real)]

    return _plan(group, *_sides_of(call), combine)


def _reduce_scatter_flat(call: OpCall, group: Any) -> Collective:
    """Inputs that hold the addends for all ranks one after the other."""
    rank, size = group.rank(), group.size()

    def combine(parts: Sequence[Parts], real: Parts) -> Parts:
        mine = [[part.reshape(-1).chunk(size)[rank] for part in p] for p in parts]
        return [_reduced(call, [m[i].view(t.shape) for m in mine], t) for i, t in enumerate(real)]

    return _plan(group, *_sides_of(call), combine)


def _reduce_scatter(call: OpCall, group: Any) -> Collective:
    """`reduce_scatter_`: a list of addends, one for each rank."""
    rank = group.rank()

    def combine(parts: Sequence[Parts], real: Parts) -> Parts:
        return [_reduced(call, [p[rank] for p in parts], real[0])]

    return _plan(group, call.args[1], call.args[0], combine)


def _all_to_all(call: OpCall, group: Any) -> Collective:
    rank = group.rank()
    return _plan(group, call.args[1], call.args[0], lambda parts, real: [p[rank] for p in parts])


def _all_to_all_flat(call: OpCall, group: Any) -> Collective | None:
    """One input whose parts go to the ranks, in equal numbers of rows."""
    rank, size = group.rank(), group.size()
    if len({*call.argument("output_split_sizes"), *call.argument("input_split_sizes")}) > 1:
        return None

    def combine(parts: Sequence[Parts], real: Parts) -> Parts:
        mine = [p[0].reshape(-1).chunk(size)[rank] for p in parts]
        return [torch.cat(mine).view(real[0].shape)]

    return _plan(group, *_sides_of(call), combine)


def _broadcast(call: OpCall, group: Any) -> Collective:
    root = call.argument("root_rank") if call.op.namespace == "c10d" else call.argument("src")
    mine = call.args[0] if group.rank() == root else ()
    gets = call.args[0] if _is_in_place(call) else None
    return _plan(group, mine, gets, lambda parts, real: parts[0], sources=[root], full=False)


def _reduce(call: OpCall, group: Any) -> Collective:
    gets = call.args[0] if group.rank() == call.argument("root_rank") else ()
    return _plan(group, call.args[0], gets, _reducing(call), full=False)


def _gather(call: OpCall, group: Any) -> Collective:
    gets = call.args[0] if group.rank() == call.argument("root_rank") else ()
    return _plan(group, call.args[1], gets, lambda parts, real: [p[0] for p in parts], full=False)


def _scatter(call: OpCall, group: Any) -> Collective:
    root, rank = call.argument("root_rank"), group.rank()
    gives = call.args[1] if rank == root else ()
    return _plan(group, gives, call.args[0], lambda parts, real: [parts[0][rank]], sources=[root], full=False)


def _sides_of(call: OpCall) -> tuple[Any, Any]:
    """Inputs and outputs of a collective that writes its first argument, or returns its result."""
    if call.op.namespace == "c10d":
        return call.args[1], call.args[0]
    return call.args[0], call.kwargs.get("out")


COLLECTIVES: dict[str, Callable[[OpCall, Any], Collective | None]] = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_"), _all_reduce),
    **dict.fromkeys(("all_reduce_coalesced", "all_reduce_coalesced_"), _all_reduce),
    "allgather_": _all_gather,
    "allgather_coalesced_": _all_gather_by_rank,
    **dict.fromkeys(("_allgather_base_", "allgather_into_tensor_coalesced_"), _all_gather_flat),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_into_tensor_coalesced"), _all_gather_flat),
    "all_gather_into_tensor_out": _all_gather_flat,
    "reduce_scatter_": _reduce_scatter,
    **dict.fromkeys(("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"), _reduce_scatter_flat),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"), _reduce_scatter_flat),
    "reduce_scatter_tensor_out": _reduce_scatter_flat,
    "alltoall_": _all_to_all,
    **dict.fromkeys(("alltoall_base_", "all_to_all_single"), _all_to_all_flat),
    **dict.fromkeys(("broadcast_", "broadcast"), _broadcast),
    "reduce_": _reduce,
    "gather_": _gather,
    "scatter_": _scatter,
}
"""Functions that compute the companions of results from those of all ranks, by the name of the op."""
