"""Snapshots of the objects that a callable can change, and their restoration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, is_lazy

from ampcheck.core.errors import UsageError
from ampcheck.torchtools.global_state import nesting, read_state, restore_state
from ampcheck.torchtools.reachable import CONTAINERS, OWNERS, Reached, reach
from ampcheck.torchtools.regions import abandoned_regions
from ampcheck.torchtools.restore import Restore, save_random_state
from ampcheck.torchtools.saving import (
    TENSOR_TABLES,
    attributes,
    contained,
    save_hooks,
    save_items,
    save_object,
    save_tensor,
)


class Snapshot:
    """A copy of everything that was reached; `restore` restores it, any number of times.

    Identity is kept: parameters, state tensors and containers are the same objects afterwards. Restored are also random
    generators (PyTorch's, numpy's, Python's, and the step's own), numpy arrays up to 64 MiB, hooks of modules and
    tensors, and PyTorch's global state of precision and autocast. Iterators and files cannot be restored. Without
    `weights` parameters are left alone, without `process` the global state and variables. Raises `UsageError` for
    parameters of lazy modules that have no shape yet.
    """

    def __init__(self, reached: Reached, *, weights: bool = True, process: bool = True) -> None:
        self._restores: list[Restore] = [save_random_state(), partial(restore_state, read_state())] if process else []
        parts = (v.modules() if isinstance(v, torch.nn.Module) else (v,) for v in reached.values)
        unique = {id(part): part for part in chain.from_iterable(parts)}
        tensors = {id(tensor): tensor for part in unique.values() for tensor in self._save(part, names=process)}
        lazy = [tensor for tensor in tensors.values() if is_lazy(tensor)]
        if lazy and weights:
            raise UsageError("a lazy module has parameters without a shape yet: run the model once, then hand it over")
        for tensor in tensors.values():
            if not weights and isinstance(tensor, (torch.nn.Parameter, UninitializedBuffer)):
                continue
            self._restores += [save_hooks(tensor, TENSOR_TABLES), save_tensor(tensor)]

    def _save(self, value: Any, *, names: bool) -> Iterator[torch.Tensor]:
        """Save one value, but not the tensors that it is or has, which are returned."""
        is_module = isinstance(value, torch.nn.Module)
        self._restores += save_object(value, names=names)
        inside: Iterable[object] = (value,) if isinstance(value, torch.Tensor) else ()
        if is_module or isinstance(value, (torch.amp.GradScaler, *OWNERS)):
            inside = attributes(value).values()
        own = (value._parameters.values(), value._buffers.values()) if is_module else ()  # of TorchScript no dicts
        parts = list(contained(chain(inside, *own), set()))
        self._restores += [save_items(part) for part in parts if isinstance(part, CONTAINERS)]
        return (part for part in parts if isinstance(part, torch.Tensor))

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
def preserved(reached: Reached, *, weights: bool = True, process: bool = True) -> Iterator[Snapshot]:
    """Restore everything that was reached on leaving, also after an exception."""
    snapshot = Snapshot(reached, weights=weights, process=process)
    try:
        with abandoned_regions() if process else nullcontext():
            yield snapshot
    finally:
        snapshot.restore()


def generators_only(reached: Reached) -> Reached:
    """The random generators among everything that was reached."""
    return Reached(values=list(reached.generators))


@contextmanager
def preserved_objects(*roots: object) -> Iterator[None]:
    """Restore on leaving the buffers, containers and attributes that the roots lead to; cheap enough for every call.

    Parameters, global variables, and what belongs to the whole process are left alone.
    """
    reached = reach({str(number): root for number, root in enumerate(roots)}, near=True)
    with preserved(reached, weights=False, process=False):
        yield
