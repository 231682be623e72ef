"""Records every sum over processes: a sample of the addends of this rank, and of the result."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ampcheck.core.formats import format_of
from ampcheck.core.run import Where
from ampcheck.facts.store import StorageMap
from ampcheck.health import Unmeasured
from ampcheck.health.values import values_of
from ampcheck.shadow.call import floating_values
from ampcheck.shadow.rules.collectives import COLLECTIVES, Collective
from ampcheck.stream.ops import OpEvent, OpSubscriber
from ampcheck.torchtools.private import backward_task, chunk_cat, without_modes
from ampcheck.torchtools.process_groups import group_among, reduction_around, wait_for
from ampcheck.torchtools.storage import Region, placements, region

_SAMPLE = 256
"""Elements of a collective that are followed."""

_SCALES = ("div", "mul")

_CALLS = 4096
"""Calls of one collective at one line that are followed on all ranks together; later ones are only counted."""


@dataclass(slots=True)
class Call:
    """One call of a collective on this rank. Samples are lists of floats. where: its op, phase and line.

    ranks: of its group. number: which call of that group it is, the same on all ranks. parts: the addends, one part for
    each process that gets a sum of its own (`reduce_scatter`), else one. wide: the addends before they were cast.
    result: the sum, of this rank's part; empty on a rank that gets none. factor: what the addends were multiplied by.
    scale: what their sum is multiplied by; None where the reduction cannot be read.
    """

    ranks: tuple[int, ...]
    number: int
    where: Where
    format: str
    elements: int
    parts: list[list[float]] = field(default_factory=list)
    wide: list[float] | None = None
    result: list[float] = field(default_factory=list)
    factor: float = 1.0
    scale: float | None = None


@dataclass(slots=True)
class _Cast:
    """The values of a 16-bit tensor before its cast, None where there was no cast, and what it was multiplied by since.

    version: of `wide`, which counts only as long as nothing has written it.
    """

    region: Region | None = None
    wide: torch.Tensor | None = None
    version: int = 0
    factor: float = 1.0

    @classmethod
    def of(cls, result: torch.Tensor, wide: torch.Tensor | None) -> _Cast:
        return cls(region(result), wide, 0 if wide is None else wide._version)

    def values(self) -> torch.Tensor | None:
        """The values before the cast, scaled as those after it."""
        if self.wide is None or self.wide._version != self.version:
            return None
        return self.wide if self.factor == 1.0 else self.wide * self.factor


class _Reduction(NamedTuple):
    """One sum over a group. whole: the tensor that has all parts, None where each is its own. result: where it is
    written; None where the op returns it, () where only another rank gets it."""

    parts: list[torch.Tensor]
    whole: torch.Tensor | None
    result: torch.Tensor | tuple[()] | None


class CollectiveWatch(OpSubscriber):
    """Records every sum over processes inside: `all_reduce`, `reduce_scatter`, `reduce`, however it is called.

    DDP's reducer and its communication hooks, FSDP2, functional collectives and those inside DTensor's own ops are all
    seen. Of each call up to 256 elements are recorded; it waits for the result, so that communication no longer
    overlaps with computation. `others` counts collectives that
    add nothing up; `inside` is set by the caller: how many modules' forwards are running.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.others: Counter[str] = Counter()
        self.inside = 0
        self._numbers: Counter[tuple[int, ...]] = Counter()
        self._followed: Counter[object] = Counter()
        self._casts = StorageMap[_Cast]()

    def see(self, event: OpEvent) -> Any:
        """Record a sum over processes, and what casts lead to one."""
        if event.higher:
            return event.run()
        if any(map(placements, event.tensors)):
            return NotImplemented  # DTensor decomposes it into ops on shards and collectives, which come here
        space, _, name = event.op._schema.name.partition("::")
        if space not in ("c10d", "_c10d_functional"):
            out = event.run()
            if space == "aten":
                self._follow_cast(event)
            return out
        base = name.strip("_")
        plan, kind = COLLECTIVES.get(name) if "reduce" in name else None, _reduction(event.args)
        strided = all(tensor.layout is torch.strided for tensor in event.tensors)
        if plan is None or not strided or kind[0] not in ("", "sum", "avg"):
            self.others.update(() if base in ("wait_tensor", "wrap_tensor_autograd") else (base,))
            return event.run()
        collective = plan(event, group_among((*event.args, *event.kwargs.values())))
        assert collective is not None  # that of a reduction is always known
        reductions = list(_reductions(name, collective))
        line = event.line()
        with without_modes(), torch.no_grad():
            calls = [self._begin(base, line, reduction, collective.group, kind) for reduction in reductions]
        out = event.run()
        with without_modes(), torch.no_grad():
            wait_for(out)
            results = floating_values(out)
            for number, (call, reduction) in enumerate(zip(calls, reductions, strict=True)):
                if call is not None and not isinstance(reduction.result, tuple):
                    result = results[number] if reduction.result is None else reduction.result
                    call.result = _sample(result, len(call.parts))
        return out

    def _begin(
        self, base: str, line: tuple[str, int | None], reduction: _Reduction, group: Any, kind: tuple[str, float]
    ) -> Call | None:
        """Record the addends; None where the call is only counted."""
        first = reduction.parts[0]
        if isinstance(values_of(first), Unmeasured) or not first.is_floating_point():
            return None
        ranks = tuple(dist.get_process_group_ranks(group))
        number = self._numbers[ranks]
        self._numbers[ranks] += 1
        if len(ranks) < 2:
            return None
        phase = "forward" if first.requires_grad or self.inside else "update"
        if backward_task() != -1:  # private name of torch 2.4 to 2.13
            phase = "backward"
        elements = sum(part.numel() for part in reduction.parts)
        fmt = format_of(first.dtype).name
        call = Call(ranks, number, Where(phase, "", base, *line), fmt, elements)
        self.calls.append(call)
        key = (ranks, call.where, fmt)
        self._followed[key] += 1
        if self._followed[key] > min(max(_CALLS // len(ranks), 16), 128):
            return None
        call.parts = [_sample(part, len(reduction.parts)) for part in reduction.parts]
        call.scale = {"sum": kind[1], "avg": 1 / len(ranks)}.get(kind[0])
        cast = None if reduction.whole is None else self._cast_of(reduction.whole)
        self._casts.pop(first)  # the collective overwrites it
        if cast is not None:
            call.factor = cast.factor
            if (wide := cast.values()) is not None:
                parts = wide.reshape(-1).chunk(len(reduction.parts))
                call.wide = [value for part in parts for value in _sample(part, len(parts))]
        return call

    def _cast_of(self, tensor: torch.Tensor) -> _Cast | None:
        cast = self._casts.get(tensor)
        return cast if cast is not None and cast.region == region(tensor) else None

    def _follow_cast(self, event: OpEvent) -> None:
        """Follow casts, divisions and packing before the collective: the values before are the addends."""
        base, args, out = event.name, event.args, event.out
        result = event.kwargs.get("out", args[0] if base.endswith("_") and args else out)
        if not isinstance(result, torch.Tensor) or isinstance(values_of(result), Unmeasured):
            return  # DTensor tries an op on fake tensors first
        cast: _Cast | None = None
        if result.is_floating_point() and result.element_size() <= 2:
            with without_modes(), torch.no_grad():
                cast = self._cast_by(event, result)
        if cast is None and not base.endswith("_") and "out" not in event.kwargs:
            return
        self._casts.pop(result)  # its values are no longer the recorded ones
        if cast is not None:
            self._casts.put(result, cast)

    def _cast_by(self, event: OpEvent, result: torch.Tensor) -> _Cast | None:
        """The cast of the result of an op; None where the op does more than to cast, scale or pack."""
        base, args = event.name, event.args
        source = args[1] if base == "copy_" else args[0] if args else None
        if base in ("cat", "_chunk_cat"):
            wides = [wide for part in args[0] if (wide := self._wide(part)) is not None]
            pack: Any = torch.cat if base == "cat" else chunk_cat
            numbers = {name: value for name, value in event.kwargs.items() if name != "out"}
            return _Cast.of(result, pack(wides, *args[1:], **numbers)) if len(wides) == len(args[0]) else None
        if not isinstance(source, torch.Tensor) or source.numel() != result.numel():
            return None
        copies, before = base in ("_to_copy", "copy_", "clone"), self._cast_of(source)
        if copies and source.element_size() > 2:
            return _Cast.of(result, self._wide(source))
        factor = 1.0 if copies else _number(args[1] if len(args) > 1 else None) if base.strip("_") in _SCALES else None
        if not factor or (copies and before is None):
            return None
        before, factor = before or _Cast(), 1 / factor if base.startswith("div") else factor
        return _Cast(region(result), before.wide, before.version, before.factor * factor)

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor before it was cast to 16 bits; those of a wider one are its own."""
        if not tensor.is_floating_point() or tensor.is_inference():
            return None
        if tensor.element_size() > 2:
            return tensor.detach()
        cast = self._cast_of(tensor)
        return None if cast is None else cast.values()


def _reduction(args: tuple[Any, ...]) -> tuple[str, float]:
    """The name of the reduction of a collective, empty where it cannot be read, and the factor of its addends."""
    names = [value for value in args if isinstance(value, str)]
    return (names[0].lower(), 1.0) if names else reduction_around(sys._getframe()) or ("", 1.0)


def _reductions(name: str, collective: Collective) -> Iterator[_Reduction]:
    """The sums of a collective: of each tensor, of each part of it, or of a list of tensors for each process."""
    size, of_lists = collective.group.size(), name == "reduce_scatter_"
    step = size if of_lists else 1
    for number, first in enumerate(range(0, len(collective.gives), step)):
        parts = collective.gives[first : first + step]
        whole = None if of_lists else parts[0]
        if whole is not None and "scatter" in name:
            parts = list(whole.detach().chunk(size))
        gets = collective.gets
        yield _Reduction(parts, whole, None if gets is None else gets[number] if gets else ())


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
