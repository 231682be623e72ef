"""The casts of weights that autocast keeps, followed from the cast to its uses."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ampcheck.autocast.guards.call_sites import Spot
from ampcheck.autocast.guards.records import StaleCast, State
from ampcheck.autocast.state import nesting

_CAST = torch.ops.aten._to_copy.default


@dataclass(slots=True)
class _Cast:
    cast: weakref.ref[torch.Tensor]
    weight: weakref.ref[torch.Tensor]
    dtype: torch.dtype
    version: int
    storage: int
    made: int


class CastNotes:
    """Which low-precision copies of weights are kept, and what happened to the weights since.

    A float32 leaf that requires a gradient is cast once in an outermost region and the copy is used until that ends.
    """

    def __init__(self) -> None:
        self.stale: Counter[StaleCast] = Counter()
        self.seen = 0
        self._casts: dict[int, _Cast] = {}
        self._written: dict[int, tuple[int, str]] = {}
        self._clock = 0

    def forget(self) -> None:
        """An outermost region ended, in whichever thread: PyTorch has dropped the copies of the whole process."""
        self._casts.clear()
        self._written.clear()

    def before(self, op: Any, args: Sequence[Any], flat: Sequence[torch.Tensor], state: State, spot: Spot) -> None:
        """An op is about to run on the tensors `flat`: judge those that are kept casts, note what it writes to."""
        if not self._casts:
            return
        for tensor in flat:
            kept = self._casts.get(id(tensor))
            if kept is not None and kept.cast() is tensor:
                self._judge(kept, op, state, spot)
        if op._schema.is_mutable:
            self._clock += 1
            for tensor in _written(op, args):
                if (storage := _storage(tensor)) is not None:
                    self._written[storage] = (self._clock, f"{spot.file}:{spot.line}")

    def after(self, op: Any, flat: Sequence[torch.Tensor], out: Any, state: State) -> None:
        """An op ran: is its result a cast that autocast keeps?"""
        if op is not _CAST or state.dtype is None or not flat:
            return
        weight = flat[0]
        leaf = weight.dtype is torch.float32 and weight.requires_grad and weight.is_leaf and not weight._is_view()
        leaf = leaf and not weight.is_inference()  # which has no version
        if not leaf or out.dtype is not state.dtype or not torch.is_autocast_cache_enabled() or not nesting():
            return
        storage = _storage(weight)
        if storage is None:
            return
        self.seen += 1
        entry = _Cast(weakref.ref(out), weakref.ref(weight), out.dtype, weight._version, storage, self._clock)
        self._casts[id(out)] = entry

    def _judge(self, kept: _Cast, op: Any, state: State, spot: Spot) -> None:
        weight, cast = kept.weight(), kept.cast()
        if weight is None or cast is None or op is _CAST:
            return
        shape = tuple(weight.shape)
        if state.dtype not in (None, kept.dtype):
            self.stale[StaleCast(shape, kept.dtype, state.dtype, "", spot.file, spot.line)] += 1
            return
        clock, place = self._written.get(kept.storage, (0, ""))
        moved = _storage(weight) != kept.storage
        if not (moved or clock > kept.made or weight._version != kept.version) or _same(weight, cast):
            return
        by = place if clock > kept.made else "the assignment of another tensor to .data" if moved else "code not seen"
        self.stale[StaleCast(shape, kept.dtype, None, by, spot.file, spot.line)] += 1


def _written(op: Any, args: Sequence[Any]) -> Iterator[torch.Tensor]:
    for argument, value in zip(op._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    yield tensor


def _storage(tensor: torch.Tensor) -> int | None:
    with suppress(NotImplementedError, RuntimeError):  # sparse and other tensors without a storage
        address: int = tensor.untyped_storage()._cdata
        return address
    return None


def _same(weight: torch.Tensor, cast: torch.Tensor) -> bool:
    """Whether the cast still is what the weight would be cast to, NaN for NaN. Fake tensors cannot tell: then not."""
    try:
        with torch.no_grad():
            now, kept = weight.detach().to(cast.dtype), cast.detach()
            return now.shape == kept.shape and bool(((now == kept) | (now.isnan() & kept.isnan())).all())
    except Exception:  # noqa: BLE001  # fake tensors and subclasses raise errors of their own
        return False
