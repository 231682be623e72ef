"""Integers that wrap around: sums and products beyond the end of a narrow format, and the floating values of them.

An op that adds or multiplies integers of up to 32 bits is computed again with 64. Where the two differ, the values of
64 bits stay beside the memory of the result, and what other ops make of it is made of both. The wrap does harm where
the two give other floating values, or another number of Python; a remainder, a mask or a slice may give the same. Bits
that are combined or shifted are no numbers: what they give is not followed.
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

_NARROW = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32))
_INTEGERS = _NARROW | {torch.int64}
_OF_BITS = ("bitwise_", "__lshift__", "__rshift__", "__ilshift__", "__irshift__", "__iand__", "__ior__", "__ixor__")
_GROWS = frozenset(("mul", "pow", "prod", "cumsum", "cumprod", "neg", "abs", "index_add", "scatter_add"))
"""Ops that may leave a format, besides those that add or contract."""

_VALUES, _NUMBER = "floating-point values", "a number that leaves the run"


def is_narrow(value: object) -> bool:
    """Return whether a value is a tensor of integers of less than 64 bits, which an op in place may wrap around."""
    return isinstance(value, torch.Tensor) and value.dtype in _NARROW


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
        results = [tensor for tensor in leaves(call.out) if tensor.dtype in _INTEGERS]
        if known is None:
            if results and _may_wrap(event, results[0]):
                self._compare(event, call, results[0], lambda: origins.current(call.traits.title, event.line), index)
            return
        with aside():
            if event.name.startswith(_OF_BITS):
                for tensor in results:
                    self._wrapped.pop(tensor)
            else:
                self._pass_on(event, call, known[0])

    def _compare(
        self, event: OpEvent, call: Call, result: torch.Tensor, place: Callable[[], Where], index: int
    ) -> None:
        """Compute an op with 64 bits, and keep these where they are other numbers."""
        with aside():
            try:
                wide = self._wide(event, call)
            except OP_ERRORS:  # an op that 64 bits do not have
                return
            if not _differ(result, wide):
                return
            count, (least, most) = int((wide != result).sum()), map(int, torch.aminmax(wide))
            ends, shape = torch.iinfo(result.dtype), tuple(result.shape)
            note = f"{ends.min:,} to {ends.max:,}, and int64 gives {least:,} to {most:,}"
            seen, name = Examination(result.numel()), dtype_name(result.dtype)
            fault = Fault(
                WRAP, place(), name, seen, shape, elements=count, numel=result.numel(), index=index, note=note
            )
            self._keep(result, fault, wide)

    def _pass_on(self, event: OpEvent, call: Call, fault: Fault) -> None:
        """Compute an op with the values of 64 bits, too: what it gives may be other integers, or do harm."""
        if call.written:  # a floating tensor, whose values of before are gone
            if any(_differ(tensor, self._values(tensor, tensor)) for tensor in event.tensors):
                self._accuse(fault, _VALUES)
            return
        try:
            wide = self._wide(event, call)
        except IndexError:  # values of 64 bits lie outside of the table that is indexed
            self._accuse(fault, _VALUES)
            return
        except OP_ERRORS:  # an op that 64 bits do not have
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
        known = self._wrapped.get(tensor)
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        now = tensor.as_strided((size,), (1,), 0)
        flat = known[1] if known is not None and len(known[1]) == size else now.to(torch.int64, copy=True)
        view_of(tensor, flat).copy_(wide)
        if _differ(now, flat):
            self._wrapped.put(tensor, (fault, flat))
        else:
            self._wrapped.pop(tensor)

    def _wide(self, event: OpEvent, call: Call) -> Any:
        """What an op gives with integers of 64 bits."""
        before = call.kept if event.traits.writes else None  # what an op in place has written over

        def widened(tensor: torch.Tensor) -> torch.Tensor:
            if before is not None and tensor is event.args[0]:
                return self._values(tensor, before).clone()
            return self._values(tensor, tensor)

        dtypes = {key: torch.int64 if value in _NARROW else value for key, value in event.kwargs.items()}
        return event.op(*map_tensors(widened, event.args), **map_tensors(widened, dtypes))

    def _values(self, tensor: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        """The values of 64 bits of a tensor that holds `now`; a floating tensor itself."""
        known = self._wrapped.get(tensor) if tensor.dtype in _INTEGERS else None
        if known is not None:
            return view_of(tensor, known[1])
        return now.long() if tensor.dtype in _NARROW else now


def _may_wrap(event: OpEvent, result: torch.Tensor) -> bool:
    """Return whether an op may leave the format of its integers."""
    traits = event.traits
    grows = traits.adds or traits.sums or traits.contracts or event.name.rstrip("_") in _GROWS
    return grows and result.dtype in _NARROW and result.numel() > 0


def _differ(value: torch.Tensor, wide: object) -> bool:
    """Return whether an op gives another result with 64 bits."""
    if not isinstance(wide, torch.Tensor) or value.shape != wide.shape:
        return True
    if value.is_floating_point() or value.is_complex():
        return not torch.allclose(value, wide.to(value.dtype), rtol=0.0, atol=0.0, equal_nan=True)
    return bool((value != wide).any())
