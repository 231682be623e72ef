"""The casts of weights that autocast caches, followed from the cast to its uses."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampcheck.autocast.guards.call_sites import CallSite
from ampcheck.autocast.guards.stats import StaleCast, State
from ampcheck.torchtools.storage import storage_number

_CAST = torch.ops.aten._to_copy.default


@dataclass(slots=True)
class _CachedCast:
    cast: weakref.ref[torch.Tensor]
    weight: weakref.ref[torch.Tensor]
    dtype: torch.dtype
    version: int
    storage: int
    clock: int


class CachedCasts:
    """Which low-precision copies of weights are cached, and what was written to the weights since.

    A float32 leaf that requires a gradient is cast once, and the copy is used until the outermost region ends; where
    autocast was switched on by `torch.set_autocast_enabled` no region ends, and only `torch.clear_autocast_cache` drops
    it.
    """

    def __init__(self) -> None:
        self.stale: Counter[StaleCast] = Counter()
        self.seen = 0
        self._casts: dict[int, _CachedCast] = {}
        self._written: dict[int, tuple[int, str]] = {}
        self._clock = 0

    def clear(self) -> None:
        """An outermost region ended, in whichever thread: PyTorch has dropped the copies of the whole process."""
        self._casts.clear()
        self._written.clear()

    def before(
        self,
        op: torch._ops.OpOverload,
        args: Sequence[object],
        inputs: Sequence[torch.Tensor],
        state: State,
        at: CallSite,
    ) -> None:
        """Judge the cached casts among the inputs of an op that is about to run; record what it writes to."""
        if not self._casts:
            return
        for tensor in inputs:
            cached = self._casts.get(id(tensor))
            if cached is not None and cached.cast() is tensor and op is not _CAST:
                self._judge(cached, tensor, state, at)
        if op._schema.is_mutable:
            self._clock += 1
            for tensor in _written(op, args):
                if (storage := storage_number(tensor)) is not None:
                    self._written[storage] = (self._clock, f"{at.file}:{at.line}")

    def after(self, op: torch._ops.OpOverload, inputs: Sequence[torch.Tensor], out: Any, state: State) -> None:
        """Record the result of an op where it is a cast that autocast caches."""
        if op is not _CAST or state.dtype is None or not inputs:
            return
        weight = inputs[0]
        leaf = weight.dtype is torch.float32 and weight.requires_grad and weight.is_leaf and not weight._is_view()
        leaf = leaf and not weight.is_inference()  # which has no version
        if not leaf or out.dtype is not state.dtype or not torch.is_autocast_cache_enabled():
            return
        if (storage := storage_number(weight)) is not None:
            self.seen += 1
            references = weakref.ref(out), weakref.ref(weight)
            self._casts[id(out)] = _CachedCast(*references, out.dtype, weight._version, storage, self._clock)

    def _judge(self, cached: _CachedCast, cast: torch.Tensor, state: State, at: CallSite) -> None:
        weight = cached.weight()
        if weight is None:
            return
        shape = tuple(weight.shape)
        if state.dtype not in (None, cached.dtype):
            self.stale[StaleCast(shape, cached.dtype, state.dtype, "", at.where("forward"))] += 1
            return
        clock, line = self._written.get(cached.storage, (0, ""))
        moved = storage_number(weight) != cached.storage
        if not (moved or clock > cached.clock or weight._version != cached.version) or _same(weight, cast):
            return
        by = line if clock > cached.clock else "the assignment of another tensor to .data" if moved else "code not seen"
        self.stale[StaleCast(shape, cached.dtype, None, by, at.where("forward"))] += 1


def _written(op: torch._ops.OpOverload, args: Sequence[object]) -> Iterator[torch.Tensor]:
    for argument, value in zip(op._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    yield tensor


def _same(weight: torch.Tensor, cast: torch.Tensor) -> bool:
    """Whether the cast equals what the weight would be cast to now, NaN for NaN; False for fake tensors."""
    try:
        with torch.no_grad():
            now, cached = weight.detach().to(cast.dtype), cast.detach()
            return now.shape == cached.shape and bool(((now == cached) | (now.isnan() & cached.isnan())).all())
    except Exception:  # noqa: BLE001  # fake tensors and subclasses raise errors of their own
        return False
