"""Snapshots of the objects that a callable can change, and their restoration."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import types
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from io import IOBase

import torch
from torch.nn.parameter import is_lazy

from ampcheck.core.errors import UsageError
from ampcheck.torchtools.closures import children
from ampcheck.torchtools.global_state import nesting
from ampcheck.torchtools.reachable import CONTAINERS, Reached, module_attributes
from ampcheck.torchtools.regions import abandoned_regions
from ampcheck.torchtools.restore import Restore, save_global_state, save_random_state
from ampcheck.torchtools.saving import (
    save_cells,
    save_items,
    save_module,
    save_module_hooks,
    save_object,
    save_tensor,
    save_tensor_hooks,
    tensors_in,
)


class Snapshot:
    """A copy of everything that was reached; `restore` restores it, any number of times.

    Identity is kept: parameters, state tensors and containers are the same objects afterwards. Restored are also random
    generators (PyTorch's, numpy's, Python's, and the step's own), numpy arrays up to 64 MiB, hooks of modules and
    tensors, and PyTorch's global state of precision and autocast. Iterators and files cannot be restored. Raises
    `UsageError` for parameters of lazy modules that have no shape yet.
    """

    def __init__(self, reached: Reached) -> None:
        self._restores: list[Restore] = [save_random_state(), save_global_state()]
        tensors: dict[int, torch.Tensor] = {}
        for part in (reached, reached.within):
            if part is not None:
                tensors.update((id(tensor), tensor) for tensor in self._save(part))
        if any(is_lazy(tensor) for tensor in tensors.values()):
            raise UsageError("a lazy module has parameters without a shape yet: run the model once, then hand it over")
        for tensor in tensors.values():
            self._restores += [save_tensor_hooks(tensor), save_tensor(tensor)]

    def _save(self, reached: Reached) -> Iterator[torch.Tensor]:
        """Save everything but the tensors, which are returned."""
        yield from reached.tensors.values()
        for module in reached.modules.values():
            for part in module.modules():
                self._restores += [*save_module(part), save_module_hooks(part)]
                yield from (t for t in (*part._parameters.values(), *part._buffers.values()) if t is not None)
                yield from tensors_in(module_attributes(part))
        for optimizer in reached.optimizers.values():
            for group in optimizer.param_groups:
                yield from group["params"]
        owners = (*reached.optimizers.values(), *reached.scalers.values(), *reached.schedulers.values())
        for owner in owners:
            self._restores += save_object(owner, deep=True)
        for holder in reached.holders:
            self._restores += save_object(holder)
        for owner in owners:
            yield from tensors_in(vars(owner))

    def restore(self) -> None:
        """Restore everything, also after one part raises; the error is raised in the end.

        Outside of autocast's regions the casts of weights that autocast still keeps are dropped: they are of other
        values.
        """
        with ExitStack() as stack:
            stack.callback(_drop_casts)
            for restore in reversed(self._restores):
                stack.callback(restore)


def _drop_casts() -> None:
    if not nesting():
        torch.clear_autocast_cache()


@contextmanager
def preserved(reached: Reached) -> Iterator[Snapshot]:
    """Restore everything that was reached on leaving, also after an exception."""
    snapshot = Snapshot(reached)
    try:
        with abandoned_regions():
            yield snapshot
    finally:
        snapshot.restore()


def generators_only(reached: Reached) -> Reached:
    """The random generators among everything that was reached."""
    within = [] if reached.within is None else reached.within.generators
    return Reached(holders=[*reached.generators, *within])


_OBJECTS = 100_000
"""Objects that `preserved_objects` follows: a model of some five thousand modules, in one to two seconds."""

_LEFT_ALONE = (
    *(str, bytes, int, float, complex, type, type(None)),
    *(types.ModuleType, ModuleSpec, IOBase, threading.Thread, threading.local, threading.Condition, threading.Event),
    *(logging.Filterer, logging.Manager, type(os.environ), torch._ops.OperatorBase),  # a logger knows all others
)
"""Types of plain values, and of objects that belong to the whole process."""


@contextmanager
def preserved_objects(*roots: object) -> Iterator[None]:
    """Restore on leaving the buffers, containers and attributes that the roots lead to; cheap enough for every call.

    Followed are modules, closures, containers and objects of any class, up to 100,000, the nearest first. Parameters,
    global variables, and objects of the whole process are left alone: namespaces, loggers, threads, files, the
    environment.
    """
    restores: list[Restore] = []
    known: dict[int, object] = {}
    waiting = deque(roots)
    while waiting and len(known) < _OBJECTS:
        value = waiting.popleft()
        kind: type = type(value)
        if _is_left_alone(kind) or id(value) in known or _is_namespace(value):
            continue
        known[id(value)] = value  # kept alive: its id is not reused
        if isinstance(value, torch.Tensor):  # to clone every weight before each call would cost more than the call
            plain = value.layout is torch.strided and not value.is_nested
            restores += [save_tensor(value)] if plain and not isinstance(value, torch.nn.Parameter) else []
        else:
            restores += _save_shallow(value)
            waiting += [child for _, child in children(value, read_globals=False)]
        if isinstance(value, types.MethodType):
            waiting.append(value.__func__)
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _save_shallow(value: object) -> list[Restore]:
    cells = save_cells(value) if isinstance(value, types.FunctionType) else []
    tables = [table for table in (value, getattr(value, "__dict__", None)) if isinstance(table, CONTAINERS)]
    return [*cells, *map(save_items, tables)]


@functools.lru_cache(maxsize=4096)
def _is_left_alone(kind: type) -> bool:
    return issubclass(kind, _LEFT_ALONE)


def _is_namespace(value: object) -> bool:
    """Whether this is the namespace of a Python module (`vars(torch)`, `globals()`), or `sys.modules`."""
    return isinstance(value, dict) and (value is sys.modules or ("__name__" in value and "__spec__" in value))
