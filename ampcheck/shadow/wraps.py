"""Integers that wrap around: sums and products beyond the end of a narrow format, and the floating values of them.

An op of PyTorch that adds or multiplies integers of less than 64 bits is computed again with 64. Where the two differ,
the values of 64 bits stay beside the memory of the result, and what other ops make of it is made of both. The wrap
does harm where the two give other floating values, or another number of Python; a remainder, a mask or a slice may
give the same. Bits that are combined or shifted are no numbers, and elements of 32 bits that are multiplied are a
hash: what they give is not followed. Nothing of the run is written: an op in place is computed again on copies, one
that draws random numbers or that is not PyTorch's own is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ampcheck.core.errors import OP_ERRORS
from ampcheck.core.run import Where
from ampcheck.facts.memory import dtype_name, view_of
from ampcheck.facts.store import StorageMap
from ampcheck.records.faults import WRAP, Fault
from ampcheck.records.results import Examination
from ampcheck.shadow.call import Call
from ampcheck.stream.ops import OpEvent, leaves
from ampcheck.torchtools.modes import aside
from ampcheck.torchtools.origin import Origins
from ampcheck.torchtools.pytree import map_tensors

_ELEMENTS = frozenset((torch.uint8, torch.int8, torch.int16))
"""Formats whose elements are not added or multiplied in order to wrap around."""

_NARROW = _ELEMENTS | {torch.int32}
_INTEGERS = _NARROW | {torch.int64}
_OF_BITS = ("bitwise_", "__lshift__", "__rshift__", "__ilshift__", "__irshift__", "__iand__", "__ior__", "__ixor__")
_SUMS = frozenset(("prod", "cumsum", "cumprod", "index_add", "scatter_add"))
_GROWS = frozenset(("mul", "pow", "neg", "abs"))
"""Ops of elements that may leave a format, besides those that add."""

_FOLLOWED = 1 << 22
"""Elements of a memory that is followed, at the most: 32 MiB of integers of 64 bits."""

_VALUES, _NUMBER = "floating-point values", "a number that leaves the run"


def is_integer(value: object) -> bool:
    """Return whether a value is a tensor of integers, which an op in place may wrap around."""
    return isinstance(value, torch.Tensor) and value.dtype in _INTEGERS and value.layout is torch.strided


class Wraps:
    """Follows integers that wrapped around, by their memory. accuse: records a fault, and what it reaches."""

    def __init__(self, accuse: Callable[[Fault, str], None]) -> None:
        self._accuse = accuse
        self._wrapped = StorageMap[tuple[Fault, torch.Tensor]]()

    def see(self, event: OpEvent, call: Call, origins: Origins, index: int) -> None:
        """Follow an op that ran and that takes integers: it gives others, floating values, or a number of Python.

        index: how many ops ran before.
        """
        known = next(filter(None, map(self._wrapped.get, event.tensors)), None) if self._wrapped.entries else None
        if known is None and not _may_wrap(event, call):
            return
        try:
            with aside():
                if known is None:
                    self._compare(event, call, lambda: origins.current(call.traits.title, event.line), index)
                else:
                    self._pass_on(event, call, known[0])
        except OP_ERRORS:  # an op or a layout that 64 bits do not have
            self._forget(call)

    def _forget(self, call: Call) -> None:
        """Follow what an op gave no further."""
        for tensor in leaves(call.out):
            self._wrapped.pop(tensor)

    def _compare(self, event: OpEvent, call: Call, place: Callable[[], Where], index: int) -> None:
        """Compute an op with 64 bits, and keep these where they are other numbers."""
        result, wide = call.out, self._wide(event, call)
        if not isinstance(wide, torch.Tensor) or not _differ(result, wide):
            return
        count, (least, most) = int((wide != result).sum()), map(int, torch.aminmax(wide))
        ends, shape = torch.iinfo(result.dtype), tuple(result.shape)
        note = f"{ends.min:,} to {ends.max:,}, and int64 gives {least:,} to {most:,}"
        seen, name = Examination(result.numel()), dtype_name(result.dtype)
        fault = Fault(WRAP, place(), name, seen, shape, elements=count, numel=result.numel(), index=index, note=note)
        self._keep(result, fault, wide)

    def _pass_on(self, event: OpEvent, call: Call, fault: Fault) -> None:
        """Compute an op with the values of 64 bits, too: what it gives may be other integers, or do harm."""
        if event.name.startswith(_OF_BITS) or event.traits.random:
            self._forget(call)
        elif _is_repeatable(event, call):
            self._repeat(event, call, fault)
        elif (call.fresh or call.written) and any(_differ(t, self._values(t, t)) for t in event.tensors):
            self._accuse(fault, _VALUES)
        else:
            self._forget(call)

    def _repeat(self, event: OpEvent, call: Call, fault: Fault) -> None:
        try:
            wide = self._wide(event, call)
        except IndexError:  # values of 64 bits lie outside of the table that is indexed
            self._accuse(fault, _VALUES)
            return
        if call.traits.leaves and wide != call.out:
            self._accuse(fault, _NUMBER)
        for tensor, value in zip(leaves(call.out), leaves(wide), strict=False):
            if tensor.dtype in _INTEGERS and tensor.shape == value.shape:
                self._keep(tensor, fault, value)
            elif tensor.dtype is not torch.bool and _differ(tensor, value):
                self._accuse(fault, _VALUES)

    def _keep(self, tensor: torch.Tensor, fault: Fault, wide: torch.Tensor) -> None:
        """Keep the values of 64 bits beside the memory of a tensor, as long as they are other ones."""
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        known, now = self._wrapped.get(tensor), tensor.as_strided((size,), (1,), 0)
        flat = known[1] if known is not None and len(known[1]) == size else now.to(torch.int64, copy=True)
        view_of(tensor, flat).copy_(wide)
        if size <= _FOLLOWED and _differ(now, flat):
            self._wrapped.put(tensor, (fault, flat))
        else:
            self._wrapped.pop(tensor)

    def _wide(self, event: OpEvent, call: Call) -> Any:
        """What an op gives with integers of 64 bits; one in place, of a copy of what it has written over."""

        def widened(tensor: torch.Tensor) -> torch.Tensor:
            if call.kept is not None and tensor is event.args[0]:
                return self._values(tensor, call.kept).clone()
            return self._values(tensor, tensor)

        dtypes = {key: torch.int64 if value in _NARROW else value for key, value in event.kwargs.items()}
        return event.op(*map_tensors(widened, event.args), **map_tensors(widened, dtypes))

    def _values(self, tensor: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        """The values of 64 bits of a tensor that holds `now`; a tensor of other numbers itself."""
        known = self._wrapped.get(tensor) if tensor.dtype in _INTEGERS else None
        if known is not None and len(known[1]) * tensor.element_size() == tensor.untyped_storage().nbytes():
            return view_of(tensor, known[1])
        return now.long() if tensor.dtype in _NARROW else now


def _may_wrap(event: OpEvent, call: Call) -> bool:
    """Return whether an op may leave the format of its integers, and can be computed again."""
    result, traits, name = call.out, event.traits, event.name.rstrip("_")
    if not isinstance(result, torch.Tensor) or result.dtype not in _NARROW or not 0 < result.numel() <= _FOLLOWED:
        return False
    of_elements = result.dtype in _ELEMENTS and (traits.adds or name in _GROWS)
    return (of_elements or traits.sums or traits.contracts or name in _SUMS) and _is_repeatable(event, call)


def _is_repeatable(event: OpEvent, call: Call) -> bool:
    """Return whether an op of PyTorch gives the same again and writes nothing that the run has: neither a generator nor
    an argument `out`, nor memory whose values of before are gone. An index beyond a table ends the process on CUDA."""
    if event.traits.namespace != "aten" or event.traits.random:
        return False
    writes = [position for position, _ in event.traits.writes]
    if writes and not (writes == [0] and call.kept is not None and is_integer(event.args[0])):
        return False
    if not all(tensor.layout is torch.strided and tensor.device.type == "cpu" for tensor in event.tensors):
        return False
    others = [tensor for tensor in event.tensors if tensor is not event.args[0]] if writes else []
    written = event.args[0].untyped_storage()._cdata if writes else 0
    return all(tensor.untyped_storage()._cdata != written for tensor in others)  # they may hold what it has written


def _differ(value: torch.Tensor, wide: torch.Tensor) -> bool:
    """Return whether an op gives another result with 64 bits."""
    if value.shape != wide.shape:
        return True
    if value.is_floating_point() or value.is_complex():
        return not torch.allclose(value, wide.to(value.dtype), rtol=0.0, atol=0.0, equal_nan=True)
    return bool((value != wide).any())
