"""The casts of weights that autocast caches, followed from the cast to its uses."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ampcheck.autocast.guards.call_sites import (
    CallSite,
    Lines,
    fork,
    function_context,
    parameter_name,
    python_call,
    users_lines,
)
from ampcheck.autocast.state import short
from ampcheck.core.run import Where
from ampcheck.records.autocast import CutCast, StaleCast, State
from ampcheck.stream.ops import OpEvent, leaves
from ampcheck.torchtools.private import CAST
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.storage import storage_number

_CAST = CAST.default
_DETACH = torch.ops.aten.detach.default


@dataclass(slots=True)
class _CachedCast:
    """call: the Python call that made it. lines: the calls that made it while gradients were off. used: whether an op
    has taken it. cut: its first use while gradients were on."""

    cast: weakref.ref[torch.Tensor]
    weight: weakref.ref[torch.Tensor]
    dtype: str
    version: int
    storage: int
    clock: int
    call: tuple[int, int]
    lines: Lines
    used: bool = False
    cut: CutCast | None = None


class CachedCasts:
    """Which low-precision copies of weights are cached, and what was written to the weights since.

    A float32 leaf that requires a gradient is cast once, and the copy is used until the outermost region ends; where
    autocast was switched on by `torch.set_autocast_enabled` no region ends, and only `torch.clear_autocast_cache` drops
    it. Before PyTorch 2.11 a copy that was made while gradients were off has no history: a forward that uses it with
    gradients on gives its weight none. cut: the uses of such casts in forwards from which backward started.
    """

    def __init__(self) -> None:
        self.stale: Counter[StaleCast] = Counter()
        self.cut: Counter[CutCast] = Counter()
        self.seen = 0
        self.known: dict[int, _CachedCast] = {}
        self._written: dict[int, tuple[int, str]] = {}
        self._clock = 0
        self.off = False  # whether a cast is cached that was made while gradients were off
        self.cuts = False  # whether a forward has used one while they were on
        self._cut_off: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def clear(self) -> None:
        """An outermost region ended, in whichever thread: PyTorch has dropped the copies of the whole process."""
        self.known.clear()
        self._written.clear()
        self.off = False

    def before(self, event: OpEvent, state: State, at: CallSite) -> None:
        """Judge the cached casts among the inputs of an op that is about to run; record what it writes to."""
        for tensor in event.tensors:
            cached = self.known.get(id(tensor))
            if cached is None or cached.cast() is not tensor or event.op is _CAST:
                continue
            if not cached.used and python_call(sys._getframe()) != cached.call:
                del self.known[id(tensor)]  # the code's own: autocast casts within the call that needs it
                continue
            cached.used = True
            self._judge(cached, tensor, state, at)
        if event.op._schema.is_mutable:
            self._clock += 1
            for tensor in leaves(event.written_values()):
                if (storage := storage_number(tensor)) is not None:
                    self._written[storage] = (self._clock, f"{at.file}:{at.line}")

    def after(self, event: OpEvent, out: Any, state: State) -> None:
        """Record the result of an op where it is a cast that autocast caches, and where a gradient is lost in it."""
        if self.cuts or (self.off and torch.is_grad_enabled()):
            self._follow(event, out, torch.is_grad_enabled())
        if event.op is not _CAST or state.dtype is None or not event.tensors:
            return
        weight = event.tensors[0]
        leaf = weight.dtype is torch.float32 and weight.requires_grad and weight.is_leaf and not weight._is_view()
        leaf = leaf and not weight.is_inference()  # which has no version
        if not leaf or short(out.dtype) != state.dtype or not torch.is_autocast_cache_enabled():
            return
        if (storage := storage_number(weight)) is not None:
            # No variable may hold this frame: the garbage collector would clear the references to the cast with it.
            lines = () if torch.is_grad_enabled() else users_lines(sys._getframe())
            call = python_call(sys._getframe())
            references, version = (weakref.ref(out), weakref.ref(weight)), weight._version
            self.seen += 1
            self.known[id(out)] = _CachedCast(*references, state.dtype, version, storage, self._clock, call, lines)
            self.off = self.off or bool(lines)

    def differentiated(self, roots: object) -> None:
        """Backward starts at these tensors: count the weights that get no gradient from them."""
        for _, root in tensors(roots) if self.cuts else ():
            self.cut.update(tuple(self._cut_off.get(root, ())))  # type: ignore[no-untyped-call]

    def _follow(self, event: OpEvent, out: object, on: bool) -> None:
        """Mark a result that depends on a weight whose cast has no history. on: gradients are."""
        cut: dict[CutCast, None] = {}
        for tensor in event.tensors:
            if self.cuts:
                cut.update(self._cut_off.get(tensor, {}))  # type: ignore[no-untyped-call]
            cached = self.known.get(id(tensor)) if on and not tensor.requires_grad else None
            if cached is None or not cached.lines or cached.cast() is not tensor or event.op is _CAST:
                continue
            weight = cached.weight()
            if weight is not None and weight.requires_grad:
                cached.cut = cached.cut or _cut(cached, weight)
                cut[cached.cut] = None
                self.cuts = True
        if cut and event.op is not _DETACH and (on or function_context(sys._getframe())):
            for _, tensor in tensors(out):
                if tensor.is_floating_point():
                    self._cut_off[tensor] = cut

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


def _cut(cached: _CachedCast, weight: torch.Tensor) -> CutCast:
    """The use of a cast without history by the op that runs."""
    name = parameter_name(sys._getframe(), weight)
    (made_in, made_at), (file, line) = fork(cached.lines, users_lines(sys._getframe()))
    where = Where("forward", module=name.rpartition(".")[0], file=file, line=line)
    return CutCast(name, tuple(weight.shape), cached.dtype, f"{made_in}:{made_at}", where)


def _same(weight: torch.Tensor, cast: torch.Tensor) -> bool:
    """Return whether the cast equals what the weight would be cast to now, NaN for NaN; False for fake tensors."""
    try:
        with torch.no_grad():
            now, cached = weight.detach().to(cast.dtype), cast.detach()
            return now.shape == cached.shape and bool(((now == cached) | (now.isnan() & cached.isnan())).all())
    except Exception:  # noqa: BLE001  # fake tensors and subclasses raise errors of their own
        return False
