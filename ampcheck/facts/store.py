"""Store of the facts about memory, by storage: all views of one memory share it, and it goes with the memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

import torch

Value = TypeVar("Value")


class StorageMap(Generic[Value]):
    """Values by the storage of tensors: all views of one memory have the same. A value goes with its storage.

        known = StorageMap[str]()
        known.put(tensor[1:], "data")
        known.get(tensor)  # "data"

    A key is a tensor, or a storage itself; what has no storage (sparse, functional) has no value.

    entries: by the number of a storage, for look-ups of each tensor of each op.
    """

    def __init__(self) -> None:
        self.entries: dict[int, tuple[weakref.ref[torch.UntypedStorage], Value]] = {}
        self._ended: Callable[[int, object], object] = self.entries.pop  # with the number of a storage that was freed

    def get(self, key: object) -> Value | None:
        """The value of a storage; None without one."""
        storage = _storage(key) if self.entries else None
        entry = None if storage is None else self.entries.get(storage._cdata)
        return None if entry is None else entry[1]

    def put(self, key: object, value: Value) -> weakref.ref[torch.UntypedStorage] | None:
        """Set the value of a storage; a reference to the storage, None for what has none."""
        storage = key if isinstance(key, torch.UntypedStorage) else _storage(key)
        if storage is None:
            return None
        alive = weakref.ref(storage, partial(self._ended, storage._cdata))
        self.entries[storage._cdata] = alive, value
        return alive

    def pop(self, key: object) -> Value | None:
        """Drop the value of a storage, and return it."""
        storage = _storage(key)
        entry = None if storage is None else self.entries.pop(storage._cdata, None)
        return None if entry is None else entry[1]

    def values(self) -> list[Value]:
        """The values of all storages."""
        return [value for _, value in self.entries.values()]

    def clear(self) -> None:
        """Drop all values."""
        self.entries.clear()

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[tuple[torch.UntypedStorage, Value]]:
        """Each storage with its value."""
        pairs = [(alive(), value) for alive, value in self.entries.values()]
        return iter([(storage, value) for storage, value in pairs if storage is not None])


def _storage(key: object) -> torch.UntypedStorage | None:
    if isinstance(key, torch.Tensor):
        try:
            return key.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return None
    return key if isinstance(key, torch.UntypedStorage) else None
