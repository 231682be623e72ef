"""Facts about parts of memory, such as those of a bucket of gradients: what was written to each last holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeAlias, TypeVar

import torch

from ampcheck.facts.store import StorageMap

Value = TypeVar("Value")

Span: TypeAlias = tuple[int, int, bool]
"""Of a tensor in its storage: the first byte, the one behind the last, and whether it has all between them."""

_MOST = 4096
"""Parts of one storage; with more of them, all have the value of all."""


class PartMap(Generic[Value]):
    """Values by parts of storages. A part that was written again has the new value, and what overlaps several parts
    their join.

    join: of the values of two parts.
    """

    def __init__(self, join: Callable[[Value, Value], Value]) -> None:
        self._join, self._parts = join, StorageMap[dict[Span, Value]]()

    def get(self, tensor: torch.Tensor) -> Value | None:
        """The value of what a tensor covers; None where no part of it has one."""
        if not self._parts.entries:
            return None
        try:
            entry = self._parts.entries.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # it has no storage
            return None
        if entry is None or not (parts := entry[1]) or not tensor.numel():
            return None
        if len(parts) == 1:
            ((span, value),) = parts.items()
            if span[0] == 0 and span[1] == tensor.untyped_storage().nbytes():
                return value
        start, stop, _ = _span(tensor)
        left, found = [(start, stop)], None  # what no later part has overwritten
        for (first, end, full), value in reversed(parts.items()):
            if any(first < stop and start < end for start, stop in left):
                found = value if found is None else self._join(value, found)
                left = list(_outside(left, first, end)) if full else left
                if not left:
                    break
        return found

    def put(self, tensor: torch.Tensor, value: Value) -> None:
        """Set the value of what a tensor covers; nothing for one without a storage or elements."""
        if not tensor.numel():
            return
        if (parts := self._parts.get(tensor)) is None:
            if self._parts.put(tensor, parts := {}) is not None:
                parts[_span(tensor)] = value
            return
        span = _span(tensor)
        if span not in parts and span[2]:
            for inside in [each for each in parts if span[0] <= each[0] and each[1] <= span[1]]:
                del parts[inside]
        self._append(parts, span, value)
        if len(parts) > _MOST:
            values = list(parts.values())
            parts.clear()
            for each in values[1:]:
                values[0] = self._join(values[0], each)
            parts[0, tensor.untyped_storage().nbytes(), True] = values[0]

    def _append(self, parts: dict[Span, Value], span: Span, value: Value) -> None:
        """Note what was written last, which is the last one in order."""
        if span in parts:
            before = parts.pop(span)
            value = value if span[2] else self._join(before, value)  # which may lie between its elements
        parts[span] = value

    def pop(self, tensor: torch.Tensor) -> bool:
        """Drop the values of what a tensor covers; whether other parts of its storage have any."""
        if (parts := self._parts.get(tensor)) is None:
            return False
        if not tensor.numel():
            return bool(parts)
        start, stop, full = _span(tensor)
        if full:
            before = list(parts.items())
            parts.clear()
            for (first, end, dense), value in before:  # in the order in which they were written
                for left in _outside([(first, end)], start, stop):
                    self._append(parts, (left[0], left[1], dense), value)
        return bool(parts)


def _outside(spans: list[tuple[int, int]], first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield what is left of spans without another."""
    for start, stop in spans:
        if start < min(stop, first):
            yield start, min(stop, first)
        if max(start, end) < stop:
            yield max(start, end), stop


def _span(tensor: torch.Tensor) -> Span:
    size, start = tensor.element_size(), int(tensor.storage_offset()) * tensor.element_size()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * size, True
    last = sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return start, start + (last + 1) * size, tensor.numel() == last + 1 and 0 not in tensor.stride()
