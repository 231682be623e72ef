"""Integers that wrap around: sums and products beyond the end of a narrow format, from which floating values are made.

Integers have no companions. An op that adds or multiplies those of up to 32 bits is computed again with 64; where the
two differ, its result has wrapped around, and so has what other ops make of it, until one makes floating values or a
number of Python. Bits that are masked or shifted are no numbers: what they give is not followed, nor are unsigned
integers that are taken for signed ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ampcheck.core.errors import OP_ERRORS
from ampcheck.core.run import Where
from ampcheck.facts.memory import dtype_name
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
_OF_BITS = ("bitwise_", "__lshift__", "__rshift__")
_MULTIPLIES = frozenset(("mul", "prod", "cumsum", "cumprod", "index_add", "scatter_add"))


class Wraps:
    """Follows integers that wrapped around, by their memory. accuse: records a fault, and what it reaches."""

    def __init__(self, accuse: Callable[[Fault, str], None]) -> None:
        self._accuse, self._wrapped = accuse, StorageMap[Fault]()

    def see(self, event: OpEvent, call: Call, origins: Origins) -> None:
        """Follow an op that ran and that takes integers: it gives others, floating values, or a number of Python."""
        known = next(filter(None, map(self._wrapped.get, event.tensors)), None) if self._wrapped.entries else None
        if not (call.fresh or call.written or call.traits.leaves):
            self._follow(event, known, call.out, lambda: origins.current(call.traits.title, event.line))
        elif known is not None:
            self._accuse(known, "a number that leaves the run" if call.traits.leaves else "floating-point values")

    def _follow(self, event: OpEvent, fault: Fault | None, out: object, place: Callable[[], Where]) -> None:
        """Note wrapped integers among the results of an op. fault: of those that it takes. place: where it stands."""
        results = [tensor for tensor in leaves(out) if tensor.dtype in _INTEGERS]
        if not results or event.name.startswith(_OF_BITS):
            return
        fault = fault or self._wraps(event, results[0], place)
        if fault is None:
            return
        for tensor in results:
            taken = event.tensors[0] if event.name == "_to_copy" else tensor
            if taken.dtype is tensor.dtype or taken.itemsize != tensor.itemsize:
                self._wrapped.put(tensor, fault)

    def _wraps(self, event: OpEvent, result: torch.Tensor, place: Callable[[], Where]) -> Fault | None:
        """The fault of an op whose result is another than in 64 bits. What an op in place takes is lost by then."""
        traits = event.traits
        if result.dtype not in _NARROW or traits.writes or not result.numel():
            return None
        if not (traits.adds or traits.sums or traits.contracts or event.name in _MULTIPLIES):
            return None
        wide_kwargs = {k: torch.int64 if v in _NARROW else v for k, v in event.kwargs.items() if k != "out"}
        try:
            with aside():
                args, kwargs = (map_tensors(_in_64_bits, part) for part in (event.args, wide_kwargs))
                wide = event.op(*args, **kwargs)
                wrapped = int((wide != result).sum())
        except OP_ERRORS:  # an op that 64 bits do not have
            return None
        if not wrapped:
            return None
        least, most = (float(value) for value in wide.double().aminmax())
        ends, name, shape = torch.iinfo(result.dtype), dtype_name(result.dtype), tuple(result.shape)
        note = f"{ends.min:,} to {ends.max:,}, and int64 gives {least:,.6g} to {most:,.6g}"
        seen = Examination(result.numel(), lost=wrapped)
        return Fault(WRAP, place(), name, seen, shape, elements=wrapped, numel=result.numel(), note=note)


def _in_64_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.long() if tensor.dtype in _NARROW else tensor
