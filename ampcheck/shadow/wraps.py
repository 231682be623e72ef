"""Signed integers of 8 and 16 bits whose sums, differences and products wrap around.

`127 - (-64)` is -65 in int8. Code that reads such a result as a number, in a floating format, meant 191. Arithmetic
modulo 256 is right as long as the result comes back into the range, as in conversions between uint8 and int8: so the
integers themselves are no fault, and what they would be without a wrap stands for them where they become floating.
Unsigned integers wrap on purpose (hues, checksums, filters of images), and so does a product with a number (hashes,
random numbers): neither is judged, nor what other ops make of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from ampcheck.core.errors import OP_ERRORS
from ampcheck.core.run import Where
from ampcheck.shadow.bounds import Examination
from ampcheck.shadow.call import MOVES, Call, leaves
from ampcheck.shadow.faults import WRAP, Fault
from ampcheck.shadow.memory import dtype_name, view_of, write_view
from ampcheck.torchtools.pytree import map_tensors

_ARITHMETIC = frozenset("add sub rsub mul neg".split())
_FOLLOWED = _ARITHMETIC | MOVES | {"_to_copy", "sum", "cumsum"}
_NARROW = (torch.int8, torch.int16)
_SIGNED = (*_NARROW, torch.int32, torch.int64)


class _Wrapped(NamedTuple):
    """flat: what the integers of a storage would be, int64; None where they wrap on purpose. fault: where they began
    to wrap."""

    flat: torch.Tensor | None
    fault: Fault | None


class Wraps:
    """The integers of a run that wrapped, by storage."""

    def __init__(self) -> None:
        self._by_storage: dict[int, tuple[weakref.ref[torch.UntypedStorage], _Wrapped]] = {}

    def read(self, call: Call) -> tuple[Fault, ...]:
        """The faults of what an op with a floating result reads as numbers, in the format of that."""
        results = call.written + call.fresh
        if not self._by_storage or not results or not _reads(call):
            return ()
        known = (self._of(t) for t in leaves((call.args, tuple(call.kwargs.values()))))
        read = (w.fault for w in known if w is not None and w.flat is not None and w.fault is not None)
        return tuple(replace(fault, dtype=dtype_name(results[0].dtype), index=call.index) for fault in read)

    def unwrapped(self, call: Call) -> Call:
        """The op on what its integers would be without a wrap."""
        return replace(call, args=map_tensors(self._wide, call.args), kwargs=map_tensors(self._wide, call.kwargs))

    def forget(self, tensor: torch.Tensor) -> None:
        """Integers were overwritten."""
        self._by_storage.pop(tensor.untyped_storage()._cdata, None)

    def follow(self, call: Call, where: Callable[[], Where]) -> None:
        """Follow an op that gives nothing but integers. where: its place."""
        out = call.out
        if call.name not in _FOLLOWED or not isinstance(out, torch.Tensor) or out.dtype not in _SIGNED:
            return
        begins = call.name in _ARITHMETIC and out.dtype in _NARROW
        if not (begins or self._by_storage) or out.layout is not torch.strided or out.is_meta or not out.numel():
            return
        sources = leaves((call.args, tuple(call.kwargs.values())))
        known = next((wrapped for t in sources if (wrapped := self._of(t)) is not None), None)
        if known is not None and known.flat is None:
            self._keep(out, known)
        elif known is not None or begins:
            self._follow_values(call, known, where)

    def _follow_values(self, call: Call, known: _Wrapped | None, where: Callable[[], Where]) -> None:
        out, wide = call.out, self._in_64_bits(call)
        if wide is None or wide.shape != out.shape or not (count := int((wide != out).sum())):
            return
        if call.name == "mul" and not all(isinstance(v, torch.Tensor) and v.dim() for v in call.args[:2]):
            self._keep(out, _Wrapped(None, None))
            return
        fault = known.fault if known is not None else None
        if fault is None:
            largest = [float(t.abs().amax()) for t in (wide, out.long())]
            fault = Fault(
                WRAP, where(), "", Examination(out.numel()), tuple(out.shape),
                amax_out=largest[1], exact_amax=largest[0], elements=count, numel=out.numel(),
                note=dtype_name(out.dtype),
            )  # fmt: skip
        flat = torch.zeros(out.untyped_storage().nbytes() // out.itemsize, dtype=torch.int64, device=out.device)
        write_view(out, flat, wide)
        self._keep(out, _Wrapped(flat, fault))

    def _in_64_bits(self, call: Call) -> torch.Tensor | None:
        """The result of an op on integers of 64 bits; None where it has none."""

        def widen(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.dtype is torch.bool else self._wide(tensor).long()

        kwargs = {n: torch.int64 if n == "dtype" else map_tensors(widen, v) for n, v in call.kwargs.items()}
        try:
            wide = call.op(*map_tensors(widen, call.args), **kwargs)
        except OP_ERRORS:
            return None
        return wide if isinstance(wide, torch.Tensor) and wide.dtype is torch.int64 else None

    def _of(self, tensor: torch.Tensor) -> _Wrapped | None:
        if not self._by_storage or tensor.dtype not in _SIGNED or tensor.layout is not torch.strided or tensor.is_meta:
            return None
        storage = tensor.untyped_storage()
        wrapped = self._by_storage[storage._cdata][1] if storage._cdata in self._by_storage else None
        if wrapped is None or wrapped.flat is None or storage.nbytes() == wrapped.flat.numel() * tensor.itemsize:
            return wrapped
        return None  # read in another format

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor:
        wrapped = self._of(tensor)
        return tensor if wrapped is None or wrapped.flat is None else view_of(tensor, wrapped.flat)

    def _keep(self, tensor: torch.Tensor, wrapped: _Wrapped) -> None:
        storage = tensor.untyped_storage()
        number = storage._cdata

        def forget(reference: object) -> None:
            if number in self._by_storage and self._by_storage[number][0] is reference:
                del self._by_storage[number]

        self._by_storage[number] = weakref.ref(storage, forget), wrapped


def _reads(call: Call) -> bool:
    return call.schema.promotes or call.name in ("_to_copy", "copy_")
