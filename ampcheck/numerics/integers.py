"""Whole numbers in floating tensors: positions, ids and counters, followed from where integers become floats.

A format with p bits of significand holds every integer up to 2**p; beyond, neighbours round to the same value. Two
different integers that become equal are a collision: two positions, rows or timestamps are then the same for good.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ampcheck.core.formats import format_of
from ampcheck.torchtools.pytree import tensors

_LARGEST = 2.0**53
"""Beyond it not even float64 holds every integer; a mask such as finfo.min is no count."""

_COUNTED = 1 << 22
"""Elements among which collisions are counted, at the most."""

_CASTS = ("aten::_to_copy", "aten::copy_")
_ARITHMETIC = frozenset(
    f"aten::{name}{suffix}" for name in ("add", "sub", "rsub", "mul", "neg", "floor", "round") for suffix in ("", "_")
)
_MOVES = frozenset(
    f"aten::{name}"
    for name in (
        "clone cat stack index index_select gather repeat flip roll constant_pad_nd scatter scatter_ where masked_fill "
        "masked_fill_ clamp clamp_ clamp_min clamp_max maximum minimum abs relu sort index_put_ expand_copy"
    ).split()
)


@dataclass(frozen=True, slots=True)
class Loss:
    """What one op did to whole numbers. dtype: the format that lost them, None where none was at risk; casts: between
    integers and floats; inexact: integers that changed; collided: how many fewer different integers are left."""

    dtype: torch.dtype | None = None
    casts: int = 0
    inexact: int = 0
    collided: int = 0


class Integers:
    """Follows floating tensors that hold integers from an integer tensor or a range, and what comes of collisions.

    in_float64: the op on the same inputs in float64, None where that does not run. handed_in: the storages of integer
    inputs; these may be samples (an image, audio), which any format rounds: they count where the model casts them to 16
    bits itself, not by way of float32. used: the places of collisions from which something reached an output, a buffer,
    a loss or a Python number; what is computed and dropped harms nobody.
    """

    def __init__(self, in_float64: Callable[[Any, Any], Any], handed_in: Collection[int] = ()) -> None:
        self.used: set[Hashable] = set()
        self._whole: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._from: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._bases: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._in_float64 = in_float64
        self._handed_in = frozenset(handed_in)

    def copied(self, tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        """A copy that stands for `tensor` as it was before an op wrote to it."""
        if tensor in self._whole:
            self._whole[copy] = True
        return copy

    def follow(self, op: Any, args: Any, kwargs: Any, out: Any) -> None:
        """A view of whole numbers holds whole numbers, and what is computed from a collision comes from it."""
        inputs = [t for _, t in tensors((args, kwargs))]
        if op.is_view and inputs:
            for _, t in tensors(out):
                self._bases[t] = ref(inputs[0])
                if inputs[0] in self._whole:
                    self._whole[t] = True
        if not len(self._from):
            return
        places = self._origins(inputs)
        if places:
            for _, t in (*tensors(out), *tensors(args[:1] if op._schema.is_mutable else ())):
                self._mark(t, places)
            if op._schema.name == "aten::_local_scalar_dense":
                self.used |= places

    def collide(self, result: torch.Tensor, place: Hashable) -> None:
        """Note that `result` holds integers that became equal at `place`."""
        self._mark(result, frozenset([place]))

    def _mark(self, tensor: torch.Tensor | None, places: frozenset[Hashable]) -> None:
        """Note where a tensor comes from, and with a view that was written the tensors that it shows a part of."""
        while tensor is not None:
            self._from[tensor] = self._origins([tensor]) | places
            tensor = self._bases[tensor]() if tensor in self._bases else None

    def reach(self, tensor: torch.Tensor) -> None:
        """Note that `tensor` is an output of the model, or a buffer that it keeps."""
        self.used |= self._origins([tensor])

    def _origins(self, values: Iterable[torch.Tensor]) -> frozenset[Hashable]:
        return frozenset().union(*(self._from[t] for t in values if t in self._from))

    def look(self, op: Any, given: Any, result: torch.Tensor) -> Loss:
        """What an op that has just run did; `given` are its inputs as they were before it."""
        name = op._schema.name
        sources = [t for _, t in tensors(given)]
        if name in _CASTS and sources:
            return self._cast(sources[-1], result)
        if name == "aten::arange" and result.is_floating_point():
            return self._made(self._exact(op, given, result), result, casts=1)
        if name in ("aten::cumsum", "aten::cumsum_") and result.is_floating_point() and _is_whole(sources[0]):
            return self._made(self._exact(op, given, result), result)
        if result.is_floating_point() and any(t in self._whole for t in sources):
            if name in _MOVES:
                if _is_whole(result):
                    self._whole[result] = True
            elif name in _ARITHMETIC:
                return self._made(self._exact(op, given, result), result)
        return Loss()

    def _cast(self, source: torch.Tensor, result: torch.Tensor) -> Loss:
        if torch.bool in (source.dtype, result.dtype) or source.is_complex() or result.is_complex():
            return Loss()
        if not result.is_floating_point():
            if not source.is_floating_point():
                return Loss()
            # From here on neighbouring integers have become one.
            beyond = source.abs().double() > format_of(source.dtype).largest_exact_integer
            return Loss(source.dtype, 1, int(beyond.sum()) if source.dtype.itemsize <= 2 else 0)
        if source.is_floating_point() and source not in self._whole:
            return Loss()
        loss = self._made(source.to(torch.float64), result, casts=1)
        if result.dtype.itemsize > 2 and source.untyped_storage().data_ptr() in self._handed_in:
            del self._whole[result]
        return loss

    def _made(self, exact: torch.Tensor | None, result: torch.Tensor, *, casts: int = 0) -> Loss:
        """The loss between whole numbers and what the format made of them."""
        if exact is None or not _is_whole(exact):
            return Loss(casts=casts)
        self._whole[result] = True
        changed = int((exact != result.double()).sum())
        if not changed:
            return Loss(casts=casts)
        inexact = changed if casts and result.dtype.itemsize <= 2 else 0
        return Loss(result.dtype, casts, inexact, _collided(exact, result.double()))

    def _exact(self, op: object, given: object, result: torch.Tensor) -> torch.Tensor | None:
        wide = next((t for _, t in tensors(self._in_float64(op, given))), None)
        return wide if wide is not None and wide.shape == result.shape else None


def _is_whole(values: torch.Tensor) -> bool:
    return not values.is_floating_point() or bool((values == values.round()).all())


def _collided(exact: torch.Tensor, result: torch.Tensor) -> int:
    """How many fewer different values there are than integers. What overflows is an infinity, and no integer."""
    exact, result = exact.reshape(-1), result.reshape(-1)
    if exact.numel() > _COUNTED:  # from the first that changed: neighbours of a range collide where it does
        first = max(0, int((exact != result).to(torch.uint8).argmax()) - 1)
        exact, result = exact[first : first + _COUNTED], result[first : first + _COUNTED]
    counted = result.isfinite() & (exact.abs() <= _LARGEST)
    return _distinct(exact[counted]) - _distinct(result[counted])


def _distinct(values: torch.Tensor) -> int:
    return len(torch.unique(values))
