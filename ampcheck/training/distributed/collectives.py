"""Records every sum over processes: a sample of the addends of this rank, and of the result."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ampcheck.core.formats import format_of
from ampcheck.health import Unmeasured
from ampcheck.health.values import values_of
from ampcheck.torchtools.process_groups import group_among, wait_for
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.source import op_name, users_line
from ampcheck.torchtools.storage import Region, StorageMap, placements, region

_SAMPLE = 256
"""Elements of a collective that are followed."""

_CALLS = 4096
"""Calls of one collective at one line that are followed on all ranks together; later ones are only counted."""


@dataclass(slots=True)
class Call:
    """One call of a collective on this rank. Samples are lists of floats.

    ranks: of its group. number: which call of that group it is, the same on all ranks. parts: the addends, one part for
    each process that gets a sum of its own (`reduce_scatter`), else one. wide: the addends before they were cast.
    result: the sum, of this rank's part; empty on a rank that gets none. factor: what the addends were multiplied by.
    """

    ranks: tuple[int, ...]
    number: int
    op: str
    phase: str
    format: str
    elements: int
    file: str
    line: int | None
    parts: list[list[float]] = field(default_factory=list)
    wide: list[float] | None = None
    result: list[float] = field(default_factory=list)
    factor: float = 1.0


@dataclass(slots=True)
class _Cast:
    """The values of a 16-bit tensor before its cast, scaled as it has been since; None where there was no cast."""

    region: Region | None = None
    sample: torch.Tensor | None = None
    factor: float = 1.0


@dataclass(slots=True)
class _Reduction:
    """A reduction over a group. result: where it is written; None where the op returns it. root: who gets it."""

    parts: list[torch.Tensor]
    result: torch.Tensor | None
    group: Any
    root: int | None = None

    def is_mine(self, ranks: tuple[int, ...]) -> bool:
        """Whether this rank gets a result."""
        return self.root is None or dist.get_rank() == ranks[self.root]


class CollectiveMode(TorchDispatchMode):
    """Records every sum over processes inside: `all_reduce`, `reduce_scatter`, `reduce`, however it is called.

    DDP's reducer and its communication hooks, FSDP2, functional collectives and those inside DTensor's own ops are all
    seen. Of each call up to 256 elements are recorded; the mode waits for its result, so that communication no longer
    overlaps with computation. Enter it outside of other dispatch modes of ampcheck. `others` counts collectives that
    add nothing up; `inside` is set by the caller: how many modules' forwards are running.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.others: Counter[str] = Counter()
        self.inside = 0
        self._numbers: Counter[tuple[int, ...]] = Counter()
        self._followed: Counter[object] = Counter()
        self._casts = StorageMap[_Cast]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if any(placements(t) for _, t in tensors((args, kwargs))):
            return NotImplemented  # DTensor decomposes it into ops on shards and collectives, which are dispatched here
        name = op_name(func)
        space, _, base = name.partition("::")
        if space not in ("c10d", "_c10d_functional"):
            out = func(*args, **kwargs)
            if space == "aten":
                self._follow_cast(base.partition(".")[0], args, out)
            return out
        base = base.partition(".")[0].strip("_")
        reducer = _REDUCERS.get((space, base))
        if reducer is None:
            self.others.update(() if base in ("wait_tensor", "wrap_tensor_autograd") else (base,))
            return func(*args, **kwargs)
        reductions = list(reducer(args))
        line = users_line(sys._getframe())
        with _disable_current_modes(), torch.no_grad():
            calls = [self._begin(base, line, reduction) for reduction in reductions]
        out = func(*args, **kwargs)
        with _disable_current_modes(), torch.no_grad():
            wait_for(out)
            results = list(out) if isinstance(out, (list, tuple)) else [out]
            for number, (call, reduction) in enumerate(zip(calls, reductions, strict=True)):
                if call is not None and reduction.is_mine(call.ranks):
                    result = reduction.result if reduction.result is not None else results[number]
                    call.result = _sample(result, len(call.parts))
        return out

    def _begin(self, base: str, line: tuple[str, int | None], reduction: _Reduction) -> Call | None:
        """Record the addends; None where the call is only counted."""
        first = reduction.parts[0]
        if isinstance(values_of(first), Unmeasured) or not first.is_floating_point():
            return None
        ranks = tuple(dist.get_process_group_ranks(reduction.group))
        number = self._numbers[ranks]
        self._numbers[ranks] += 1
        if len(ranks) < 2:
            return None
        phase = "forward" if first.requires_grad or self.inside else "update"
        if torch._C._current_graph_task_id() != -1:  # private name of torch 2.4 to 2.13
            phase = "backward"
        elements = sum(part.numel() for part in reduction.parts)
        fmt = format_of(first.dtype).name
        call = Call(ranks, number, base, phase, fmt, elements, *line)
        self.calls.append(call)
        key = (ranks, base, phase, fmt, line)
        self._followed[key] += 1
        if self._followed[key] > min(max(_CALLS // len(ranks), 16), 128):
            return None
        call.parts = [_sample(part, len(reduction.parts)) for part in reduction.parts]
        cast = self._cast_of(first)
        self._casts.pop(first)  # the collective overwrites it
        if cast is not None:
            call.factor = cast.factor
            if cast.sample is not None and len(reduction.parts) == 1:
                call.wide = cast.sample.tolist()
        return call

    def _cast_of(self, tensor: torch.Tensor) -> _Cast | None:
        cast = self._casts.get(tensor)
        return cast if cast is not None and cast.region == region(tensor) else None

    def _follow_cast(self, base: str, args: tuple[Any, ...], out: object) -> None:
        """A communication hook casts and divides before the collective: the values before that are the addends."""
        source = args[1] if base == "copy_" else args[0] if args else None
        result = args[0] if base.endswith("_") and args else out
        if not isinstance(source, torch.Tensor) or not isinstance(result, torch.Tensor):
            return
        low = result.is_floating_point() and result.element_size() <= 2
        if isinstance(values_of(source), Unmeasured):  # DTensor tries an op on fake tensors first
            return
        cast: _Cast | None = None
        if base in ("_to_copy", "copy_"):
            if low and source.is_floating_point() and result.numel() == source.numel() and source.element_size() > 2:
                with _disable_current_modes(), torch.no_grad():
                    cast = _Cast(region(result), torch.tensor(_sample(source), dtype=torch.float64))
        elif base in ("div", "div_", "mul", "mul_"):
            factor = _number(args[1] if len(args) > 1 else None)
            if factor is not None and low:
                factor = 1 / factor if base.startswith("div") and factor else factor
                before = self._cast_of(source) or _Cast()
                sample = None if before.sample is None else before.sample * factor
                cast = _Cast(region(result), sample, factor * before.factor)
        elif not base.endswith("_"):
            return
        self._casts.pop(result)  # its values are no longer the recorded ones
        if cast is not None:
            self._casts.put(result, cast)


_Args: TypeAlias = "tuple[Any, ...]"


def _split(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    return list(tensor.detach().chunk(group.size()))


def _reduce(args: _Args, rooted: bool = True) -> Iterator[_Reduction]:
    root = (
        next(value for value in args[1:] if isinstance(value, int) and not isinstance(value, bool)) if rooted else None
    )
    return (_Reduction([tensor], tensor, group_among(args), root) for tensor in args[0])


def _scatter_base(args: _Args) -> Iterator[_Reduction]:
    group = group_among(args)
    yield _Reduction(_split(args[1], group), args[0], group)


def _scatter_lists(args: _Args) -> Iterator[_Reduction]:
    group = group_among(args)
    for out, addends in zip(args[0], args[1], strict=True):
        parts = list(addends) if isinstance(addends, (list, tuple)) else _split(addends, group)
        yield _Reduction(parts, out, group)


def _functional(args: _Args, scatter: bool = False) -> Iterator[_Reduction]:
    group = group_among(args)
    for tensor in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
        yield _Reduction(_split(tensor, group) if scatter else [tensor], None, group)


_REDUCERS: dict[tuple[str, str], Callable[[_Args], Iterator[_Reduction]]] = {
    ("c10d", "allreduce"): partial(_reduce, rooted=False),
    ("c10d", "allreduce_coalesced"): partial(_reduce, rooted=False),
    ("c10d", "reduce"): _reduce,
    ("c10d", "reduce_scatter_base"): _scatter_base,
    ("c10d", "reduce_scatter"): _scatter_lists,
    ("c10d", "reduce_scatter_tensor_coalesced"): _scatter_lists,
    ("_c10d_functional", "all_reduce"): _functional,
    ("_c10d_functional", "all_reduce_coalesced"): _functional,
    ("_c10d_functional", "reduce_scatter_tensor"): partial(_functional, scatter=True),
    ("_c10d_functional", "reduce_scatter_tensor_coalesced"): partial(_functional, scatter=True),
}
"""Collectives that add up over processes, by namespace and name without underscores at its ends."""


def _sample(tensor: torch.Tensor, parts: int = 1) -> list[float]:
    """Up to `_SAMPLE` elements of all parts together, evenly spread."""
    flat = tensor.detach().reshape(-1)
    step = max(-(-flat.numel() // max(_SAMPLE // parts, 1)), 1)
    values: list[float] = flat[::step].cpu().double().tolist()
    return values


def _number(value: object) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and value.device.type == "cpu" else None
    return float(value) if isinstance(value, (int, float)) else None
