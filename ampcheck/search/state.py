"""What a call changes in the Python objects that it runs: attributes, counters, caches, rebound buffers."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from io import IOBase
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_PLAIN = (str, bytes, int, float, complex, type, type(None))
_PROCESS_WIDE = (
    ModuleType,
    ModuleSpec,
    IOBase,
    threading.Thread,
    threading.local,
    threading.Condition,
    threading.Event,
    logging.Filterer,  # a logger knows all others
    logging.Manager,
    type(os.environ),
    torch._ops.OperatorBase,
)
_FOLLOWED = 100_000
"""Objects that are looked at, the nearest first: a model of some five thousand modules, in one to two seconds."""


@contextmanager
def kept(*held: Any) -> Iterator[None]:
    """Everything that `held` reaches is inside as it was, once the block ends: tensors, containers and attributes.

    Followed are `torch.nn.Module`s, functions' closures, lists, dicts, sets, deques and plain objects, up to 100,000 of
    them, the nearest first. What is found in a global variable or behind an extension's object is left alone, and so is
    what belongs to the whole process: Python modules and their namespaces, loggers, threads, files, the environment.
    """
    undo: list[Callable[[], None]] = []
    known: set[int] = set()
    opaque = _Opaque()
    alive: list[Any] = []  # an id is free again when its object is gone
    waiting = deque(held)
    while waiting and len(alive) < _FOLLOWED:
        value = waiting.popleft()
        if opaque[type(value)] or id(value) in known or _namespace(value):
            continue
        known.add(id(value))
        alive.append(value)
        waiting += _watch(value, undo)
    try:
        yield
    finally:
        for step in undo:
            step()


def _watch(value: Any, undo: list[Callable[[], None]]) -> list[Any]:
    """Add to `undo` what puts `value` back; what it holds."""
    if isinstance(value, torch.Tensor):
        # Nothing trains here; to clone every weight before each call would cost more than the call.
        if not isinstance(value, torch.nn.Parameter) and value.layout is torch.strided and not value.is_nested:
            before = value.detach().clone()
            version = value._version if not value.is_inference() else -1
            undo.append(lambda: _put_back(value, before, version))
        return []
    if isinstance(value, (dict, list, set, deque)):
        items = list(value.items()) if isinstance(value, dict) else list(value)
        undo.append(lambda: _refill(value, items))
        return [item for _, item in items] if isinstance(value, dict) else items
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, CellType):
        with suppress(ValueError):  # an empty cell
            content = value.cell_contents
            undo.append(lambda: setattr(value, "cell_contents", content))
            return [content]
        return []
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        return [*(value.__closure__ or ()), *(value.__defaults__ or ()), vars(value)]
    own = getattr(value, "__dict__", None)
    return [own] if isinstance(own, dict) else []


class _Opaque(dict[type, bool]):
    """By type, whether its objects are left alone: abstract classes are slow to ask, and asked once."""

    def __missing__(self, kind: type) -> bool:
        return self.setdefault(kind, issubclass(kind, (*_PLAIN, *_PROCESS_WIDE)))


def _namespace(value: Any) -> bool:
    """Whether this is what a Python module holds: `vars(torch)`, `globals()`, or `sys.modules` itself."""
    return isinstance(value, dict) and (value is sys.modules or ("__name__" in value and "__spec__" in value))


def _put_back(tensor: torch.Tensor, before: torch.Tensor, version: int) -> None:
    if version != -1 and tensor._version == version:
        return
    with torch.no_grad():
        if tensor.shape != before.shape:
            tensor.set_(before)  # type: ignore[call-overload]
        else:
            tensor.copy_(before)


def _refill(held: Any, items: list[Any]) -> None:
    """Give a container its items again, if it holds others now: code that is compiled guards on containers."""
    now = list(held.items()) if isinstance(held, dict) else list(held)
    if len(now) == len(items) and all(_same(a, b) for a, b in zip(now, items, strict=True)):
        return
    held.clear()
    held.update(items) if isinstance(held, (dict, set)) else held.extend(items)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:
        return one[0] is other[0] and one[1] is other[1]
    return one is other
