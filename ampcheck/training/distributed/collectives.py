"""Every sum over processes as it is asked for: a sample of what goes in on this rank, and of what comes out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ampcheck.core.formats import format_of
from ampcheck.health import Unmeasured
from ampcheck.health.values import values_of
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.source import op_name, users_line
from ampcheck.torchtools.storage import placements

_SAMPLE = 256
"""Elements of a collective that are followed."""

_KEPT = 4096
"""Calls of one collective at one line that are followed on all ranks together; the later ones are only counted."""


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
    """What a 16-bit tensor was before its cast, scaled as it has been since; `factor` alone where there was no cast."""

    sample: torch.Tensor | None
    factor: float


class CollectiveWatch(TorchDispatchMode):
    """Follow every sum over processes that runs inside: `all_reduce`, `reduce_scatter`, `reduce`, however it is called.

    DDP's reducer and its communication hooks, FSDP2, functional collectives and those inside DTensor's own ops are all
    seen. Of each call up to 256 elements are kept; the watch waits for its result, so that communication no longer
    overlaps with computation. Enter it outside of other dispatch modes of ampcheck. `others` counts collectives that
    add nothing up; `inside` is set by the caller: how many modules' forwards are running.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.others: dict[str, int] = {}
        self.inside = 0
        self._numbers: dict[tuple[int, ...], int] = {}
        self._followed: dict[Any, int] = {}
        self._casts: dict[tuple[int, int, int], tuple[_Cast, StorageWeakRef]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if any(placements(t) for _, t in tensors((args, kwargs))):
            return NotImplemented  # DTensor breaks it down into ops on shards and collectives, which come back here
        name = op_name(func)
        space, _, base = name.partition("::")
        if space not in ("c10d", "_c10d_functional"):
            out = func(*args, **kwargs)
            if space == "aten":
                self._follow_cast(name, args, out)
            return out
        base = base.partition(".")[0].strip("_")
        reducer = _REDUCERS.get((space, base))
        if reducer is None:
            if base not in ("wait_tensor", "wrap_tensor_autograd"):
                self.others[base] = self.others.get(base, 0) + 1
            return func(*args, **kwargs)
        sums = list(reducer(args))
        for one in sums:
            one.file, one.line = users_line(sys._getframe())
        with _disable_current_modes(), torch.no_grad():
            calls = [self._begin(base, one) for one in sums]
        out = func(*args, **kwargs)
        with _disable_current_modes(), torch.no_grad():
            _wait(out)
            results = list(out) if isinstance(out, (list, tuple)) else [out]
            for place, (call, one) in enumerate(zip(calls, sums, strict=True)):
                if call is not None:
                    target = one.result if one.result is not None else results[place]
                    call.result = _sample(target, _each(len(call.parts))) if one.mine(call.ranks) else []
        return out

    def _begin(self, base: str, one: _Asked) -> Call | None:
        first = one.parts[0]
        if isinstance(values_of(first), Unmeasured) or not first.is_floating_point():
            return None
        ranks = tuple(dist.get_process_group_ranks(one.group))
        number = self._numbers[ranks] = self._numbers.get(ranks, -1) + 1
        if len(ranks) < 2:
            return None
        phase = "update"
        if torch._C._current_graph_task_id() != -1:  # private name of torch 2.4 to 2.13
            phase = "backward"
        elif first.requires_grad or self.inside:
            phase = "forward"
        elements = sum(part.numel() for part in one.parts)
        fmt = format_of(first.dtype).name
        call = Call(ranks, number, base, phase, fmt, elements, one.file, one.line)
        place = (ranks, base, phase, fmt, one.file, one.line)
        self._followed[place] = self._followed.get(place, 0) + 1
        self.calls.append(call)
        if self._followed[place] > min(max(_KEPT // len(ranks), 16), 128):
            return None
        call.parts = [_sample(part, _each(len(one.parts))) for part in one.parts]
        if held := self._casts.pop(_key(first), None):  # what the collective writes there is no addend any more
            call.factor = held[0].factor
            if held[0].sample is not None and len(one.parts) == 1:
                call.wide = held[0].sample.tolist()
        return call

    def _follow_cast(self, name: str, args: Any, out: Any) -> None:
        """A communication hook casts, divides, and hands over: what it was given is what should have been added up."""
        base = name.removeprefix("aten::").partition(".")[0]
        source: Any = args[0] if args else None
        if base == "copy_":
            self._casts.pop(_key(source), None)
            source, out = args[1], args[0]
        if base in ("_to_copy", "copy_") and isinstance(out, torch.Tensor) and isinstance(source, torch.Tensor):
            wide = source.is_floating_point() and out.is_floating_point() and out.numel() == source.numel() > 0
            if isinstance(values_of(source), Unmeasured):  # DTensor tries an op on fake tensors first
                return
            if wide and out.element_size() <= 2 < source.element_size():
                with _disable_current_modes(), torch.no_grad():
                    self._note(out, _Cast(torch.tensor(_sample(source, _SAMPLE), dtype=torch.float64), 1.0))
        elif base in ("div", "div_", "mul", "mul_") and isinstance(source, torch.Tensor):
            scalar = args[1] if len(args) > 1 else None
            result = out if isinstance(out, torch.Tensor) else source
            factor = _number(scalar)
            if factor is None or not source.is_floating_point() or result.element_size() > 2:
                self._casts.pop(_key(result), None)
                return
            factor = 1 / factor if base.startswith("div") and factor else factor
            held = self._casts.get(_key(source))
            before = held[0] if held else _Cast(None, 1.0)
            sample = None if before.sample is None else before.sample * factor
            self._note(result, _Cast(sample, before.factor * factor))
        elif base.endswith("_") and self._casts and isinstance(source, torch.Tensor):
            self._casts.pop(_key(source), None)  # its values are no longer those that were noted

    def _note(self, tensor: torch.Tensor, cast: _Cast) -> None:
        if isinstance(values_of(tensor), Unmeasured):
            return
        if len(self._casts) > 512:
            self._casts.pop(next(iter(self._casts)))
        # While the weak reference is held no other storage gets the same number.
        held = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._casts[_key(tensor)] = cast, held


@dataclass(slots=True)
class _Asked:
    """What a collective was asked for. result: where it is written; None where the op returns it. root: who gets it."""

    parts: list[torch.Tensor]
    result: torch.Tensor | None
    group: Any
    root: int | None = None
    file: str = ""
    line: int | None = None

    def mine(self, ranks: tuple[int, ...]) -> bool:
        """Whether this rank gets a result."""
        return self.root is None or dist.get_rank() == ranks[self.root]


def _boxed_group(args: Any) -> Any:
    boxed = next(one for one in args if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one))
    return dist.ProcessGroup.unbox(boxed)


def _named_group(args: Any) -> Any:
    from torch.distributed import distributed_c10d  # a build without torch.distributed has none

    # Private name of torch 2.4 to 2.13: a functional collective is given its group by name.
    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
    return resolve([one for one in args if isinstance(one, str)][-1])


def _split(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    return list(tensor.detach().chunk(group.size()))


def _all_reduce(args: Any) -> Iterator[_Asked]:
    for tensor in args[0]:
        yield _Asked([tensor], tensor, _boxed_group(args))


def _reduce(args: Any) -> Iterator[_Asked]:
    root = next(one for one in args[1:] if isinstance(one, int) and not isinstance(one, bool))
    for tensor in args[0]:
        yield _Asked([tensor], tensor, _boxed_group(args), root)


def _scatter_base(args: Any) -> Iterator[_Asked]:
    group = _boxed_group(args)
    yield _Asked(_split(args[1], group), args[0], group)


def _scatter_lists(args: Any) -> Iterator[_Asked]:
    group = _boxed_group(args)
    for out, given in zip(args[0], args[1], strict=True):
        yield _Asked(list(given) if isinstance(given, (list, tuple)) else _split(given, group), out, group)


def _functional(args: Any) -> Iterator[_Asked]:
    group = _named_group(args)
    for tensor in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
        yield _Asked([tensor], None, group)


def _functional_scatter(args: Any) -> Iterator[_Asked]:
    group = _named_group(args)
    for tensor in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
        yield _Asked(_split(tensor, group), None, group)


_REDUCERS: dict[tuple[str, str], Callable[[Any], Iterator[_Asked]]] = {
    ("c10d", "allreduce"): _all_reduce,
    ("c10d", "allreduce_coalesced"): _all_reduce,
    ("c10d", "reduce"): _reduce,
    ("c10d", "reduce_scatter_base"): _scatter_base,
    ("c10d", "reduce_scatter"): _scatter_lists,
    ("c10d", "reduce_scatter_tensor_coalesced"): _scatter_lists,
    ("_c10d_functional", "all_reduce"): _functional,
    ("_c10d_functional", "all_reduce_coalesced"): _functional,
    ("_c10d_functional", "reduce_scatter_tensor"): _functional_scatter,
    ("_c10d_functional", "reduce_scatter_tensor_coalesced"): _functional_scatter,
}
"""What adds up over processes, by namespace and name without underscores at its ends."""


def _wait(out: Any) -> None:
    for one in out if isinstance(out, (list, tuple)) else [out]:
        if isinstance(one, torch.ScriptObject):
            torch._C._distributed_c10d.Work.unbox(one).wait()
        else:
            for _, tensor in tensors(one):
                torch.ops._c10d_functional.wait_tensor(tensor)


def _each(parts: int) -> int:
    return max(_SAMPLE // parts, 1)


def _sample(tensor: torch.Tensor, count: int) -> list[float]:
    """Up to `count` elements, evenly spread."""
    flat = tensor.detach().reshape(-1)
    step = max(-(-flat.numel() // count), 1)
    values: list[float] = flat[::step].cpu().double().tolist()
    return values


def _key(tensor: torch.Tensor) -> tuple[int, int, int]:
    try:
        return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.numel()
    except (RuntimeError, NotImplementedError):
        return 0, 0, 0


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and value.device.type == "cpu" else None
    return float(value) if isinstance(value, (int, float)) else None
