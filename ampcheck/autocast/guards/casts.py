"""The casts of weights that autocast caches, followed from the cast to its uses."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
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
from ampcheck.autocast.guards.stats import CutCast, StaleCast, State
from ampcheck.core.run import Where
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.storage import storage_number

_CAST = torch.ops.aten._to_copy.default
_DETACH = torch.ops.aten.detach.default


@dataclass(slots=True)
class _CachedCast:
    """call: the Python call that made it. lines: the calls that made it while gradients were off. used: whether an op
    has taken it. cut: its first use while gradients were on."""

    cast: weakref.ref[torch.Tensor]
    weight: weakref.ref[torch.Tensor]
    dtype: torch.dtype
    version: int
    storage: int
    clock: int
    call: tuple[int, int]
    lines: Lines
    used: bool = False
    cut: CutCast | None = None


@dataclass(slots=True)
class _Untrained:
    """A weight of which the code keeps such a cast. steps: of an optimizer that has it, all without a gradient; 0 once
    it had one."""

    weight: weakref.ref[torch.Tensor]
    version: int
    steps: int | None = None


class CachedCasts:
    """Which low-precision copies of weights are cached, and what was written to the weights since.

    A float32 leaf that requires a gradient is cast once, and the copy is used until the outermost region ends; where
    autocast was switched on by `torch.set_autocast_enabled` no region ends, and only `torch.clear_autocast_cache` drops
    it. Before PyTorch 2.11 a copy that was made while gradients were off has no history: a forward that uses it with
    gradients on gives its weight none. A copy that the code keeps for itself has none in any release; it counts where
    an optimizer steps the weight, which never has a gradient and never changes.
    """

    def __init__(self) -> None:
        self.stale: Counter[StaleCast] = Counter()
        self._cut: Counter[CutCast] = Counter()
        self.seen = 0
        self._casts: dict[int, _CachedCast] = {}
        self._written: dict[int, tuple[int, str]] = {}
        self._clock = 0
        self._off = False  # whether a cast is cached that was made while gradients were off
        self._cuts = False  # whether a forward has used one while they were on
        self._own: dict[int, _CachedCast] = {}
        self._untrained: dict[CutCast, _Untrained] = {}
        self._cut_off: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def clear(self) -> None:
        """An outermost region ended, in whichever thread: PyTorch has dropped the copies of the whole process."""
        self._casts.clear()
        self._written.clear()
        self._off = False

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
            if cached is None or cached.cast() is not tensor or op is _CAST:
                continue
            if not cached.used and python_call(sys._getframe()) != cached.call:
                del self._casts[id(tensor)]  # the code's own: autocast casts within the call that needs it
                self._keep(cached)
                continue
            cached.used = True
            self._judge(cached, tensor, state, at)
        if op._schema.is_mutable:
            self._clock += 1
            for tensor in _written(op, args):
                if (storage := storage_number(tensor)) is not None:
                    self._written[storage] = (self._clock, f"{at.file}:{at.line}")

    def after(self, op: torch._ops.OpOverload, inputs: Sequence[torch.Tensor], out: Any, state: State) -> None:
        """Record the result of an op where it is a cast that autocast caches, and where a gradient is lost in it."""
        if self._cuts or ((self._off or self._own) and torch.is_grad_enabled()):
            self._follow(op, inputs, out, torch.is_grad_enabled())
        if op is not _CAST or not inputs or (state.dtype is None and torch.is_grad_enabled()):
            return
        weight = inputs[0]
        leaf = weight.dtype is torch.float32 and weight.requires_grad and weight.is_leaf and not weight._is_view()
        leaf = leaf and not weight.is_inference()  # which has no version
        kept = out.dtype is state.dtype and torch.is_autocast_cache_enabled()
        low = out.is_floating_point() and out.dtype.itemsize == 2
        if not leaf or not (kept or (low and not torch.is_grad_enabled())):
            return
        if (storage := storage_number(weight)) is not None:
            # No variable may hold this frame: the garbage collector would clear the references to the cast with it.
            lines = () if torch.is_grad_enabled() else users_lines(sys._getframe())
            call = python_call(sys._getframe())
            references, version = (weakref.ref(out), weakref.ref(weight)), weight._version
            cast = _CachedCast(*references, out.dtype, version, storage, self._clock, call, lines)
            if not kept:
                self._keep(cast)
                return
            self.seen += 1
            self._casts[id(out)] = cast
            self._off = self._off or bool(lines)

    def differentiated(self, roots: object) -> None:
        """Backward starts at these tensors: count the weights that get no gradient from them."""
        for _, root in tensors(roots) if self._cuts else ():
            self._cut.update(tuple(self._cut_off.get(root, ())))  # type: ignore[no-untyped-call]

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step: its weights that have a gradient are trained."""
        if not self._untrained:
            return
        gradients = {id(p): p.grad is not None for group in optimizer.param_groups for p in group["params"]}
        for untrained in self._untrained.values():
            weight = untrained.weight()
            if weight is not None and id(weight) in gradients and untrained.steps != 0:
                untrained.steps = 0 if gradients[id(weight)] else (untrained.steps or 0) + 1

    @property
    def cut(self) -> Counter[CutCast]:
        """The uses of casts without history in forwards from which backward started."""
        return Counter({cut: times for cut, times in self._cut.items() if not cut.own or self._never_trained(cut)})

    def _never_trained(self, cut: CutCast) -> bool:
        untrained = self._untrained[cut]
        weight = untrained.weight()
        return (untrained.steps or 0) > 1 and weight is not None and weight._version == untrained.version

    def _keep(self, cast: _CachedCast) -> None:
        """Follow a cast that the code made while gradients were off, as long as it lives."""
        if cast.lines and (tensor := cast.cast()) is not None:
            number = id(tensor)
            cast.cast = weakref.ref(tensor, lambda _: self._own.pop(number, None))
            self._own[number] = cast

    def _follow(self, op: torch._ops.OpOverload, inputs: Sequence[torch.Tensor], out: object, on: bool) -> None:
        """Mark a result that depends on a weight whose cast has no history. on: gradients are."""
        cut: dict[CutCast, None] = {}
        for tensor in inputs:
            if self._cuts:
                cut.update(self._cut_off.get(tensor, {}))  # type: ignore[no-untyped-call]
            off = on and not tensor.requires_grad
            own = self._own.get(id(tensor)) if off else None
            cached = own or (self._casts.get(id(tensor)) if off else None)
            if cached is None or not cached.lines or cached.cast() is not tensor or op is _CAST:
                continue
            weight = cached.weight()
            if weight is not None and weight.requires_grad:
                cached.cut = cached.cut or _cut(cached, weight, own=own is not None)
                if own is not None:
                    untrained = _Untrained(cached.weight, weight._version)
                    self._untrained.setdefault(cached.cut, untrained)
                cut[cached.cut] = None
                self._cuts = True
        if cut and op is not _DETACH and (on or function_context(sys._getframe())):
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


def _cut(cached: _CachedCast, weight: torch.Tensor, *, own: bool) -> CutCast:
    """The use of a cast without history by the op that runs."""
    name = parameter_name(sys._getframe(), weight)
    (made_in, made_at), (file, line) = fork(cached.lines, users_lines(sys._getframe()))
    where = Where("forward", module=name.rpartition(".")[0], file=file, line=line)
    return CutCast(name, tuple(weight.shape), cached.dtype, f"{made_in}:{made_at}", where, own)


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
