"""The memory of tensors: which share it, and which part of a sharded one is on this process."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from ampcheck.torchtools.private import NO_DISPATCH, FakeTensor, is_transformed_tensor, transformed_from, transforms

Value = TypeVar("Value")

Region: TypeAlias = "tuple[int, int, int]"
"""Number of the storage, offset and length in elements."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a `DTensor` that is on this process, detached; any other tensor itself, detached."""
    detached = tensor.detach()
    part = getattr(detached, "to_local", None)
    return detached if part is None else part()


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside the wrappers of `torch.func` transforms, which have no storage; any other tensor itself."""
    while is_transformed_tensor(tensor):
        tensor = transformed_from(tensor)
    return tensor


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor can be read from its storage; a wrapper around other tensors has none of its own,
    though its storage has a size, and reading it ends the process."""
    if type(tensor).__torch_dispatch__ is NO_DISPATCH:
        return True
    if isinstance(tensor, FakeTensor):
        return False
    try:
        return bool(tensor.untyped_storage().data_ptr()) or not tensor.numel()
    except (RuntimeError, NotImplementedError):
        return False


def device_of(tensor: torch.Tensor) -> torch.device:
    """The device of a tensor's memory, also where the emulation of another device lets the tensor report that one."""
    if torch.nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
        return tensor.device
    tensor = unwrapped(tensor)
    return tensor.untyped_storage().device if has_memory(tensor) else tensor.device


def storage_number(tensor: torch.Tensor) -> int | None:
    """A number that all views of a tensor share while their storage lives; None without one (sparse, functional)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


def region(tensor: torch.Tensor) -> Region | None:
    """The part of its storage that a tensor covers; None for a tensor without a storage."""
    number = storage_number(tensor)
    return None if number is None else (number, int(tensor.storage_offset()), tensor.numel())


def placements(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The placements of a DTensor, one for each dimension of its mesh; of any other tensor none."""
    # A DTensor exists only where its module was imported, and importing it takes seconds.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return tuple(tensor.placements) if kind is not None and isinstance(tensor, kind) else ()


def is_pending(tensor: torch.Tensor) -> bool:
    """Whether a tensor contains addends that are still to be summed over processes (`Partial`)."""
    return any(part.is_partial() for part in placements(tensor))


class StorageMap(Generic[Value]):
    """Values by the storage of tensors: all views of one memory have the same. A value goes with its storage.

    The key is a tensor, or a storage itself.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[torch.UntypedStorage], Value]] = {}

    def get(self, key: object) -> Value | None:
        """The value of a storage; None without one, and for what has no storage."""
        if not self._values:
            return None
        try:
            storage = key.untyped_storage() if isinstance(key, torch.Tensor) else key
        except (RuntimeError, NotImplementedError):
            return None
        entry = self._values.get(storage._cdata) if isinstance(storage, torch.UntypedStorage) else None
        return None if entry is None else entry[1]

    def put(self, key: object, value: Value) -> None:
        """Set the value of a storage; nothing for what has no storage."""
        storage = _storage(key)
        if storage is not None:
            number = storage._cdata
            self._values[number] = weakref.ref(storage, lambda _: self._values.pop(number, None)), value

    def pop(self, key: object) -> Value | None:
        """Drop the value of a storage."""
        storage = _storage(key)
        entry = None if storage is None else self._values.pop(storage._cdata, None)
        return None if entry is None else entry[1]

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[tuple[torch.UntypedStorage, Value]]:
        """Each storage with its value."""
        pairs = [(alive(), value) for alive, value in self._values.values()]
        return iter([(storage, value) for storage, value in pairs if storage is not None])


def _storage(key: object) -> torch.UntypedStorage | None:
    if isinstance(key, torch.Tensor):
        try:
            return key.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return None
    return key if isinstance(key, torch.UntypedStorage) else None


def is_transformed() -> bool:
    """Whether a function transform (`torch.func.vmap`, `grad`, `jvp`) runs: values may not leave its tensors."""
    return transforms() is not None
