"""Which tensors are on a device that is not there, of CUDA, XPU or MPS: recorded by storage, and read from files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ampcheck.autocast.cuda_stand_in import current_device, placed_kind
from ampcheck.facts.store import StorageMap
from ampcheck.torchtools.patching import replaced
from ampcheck.torchtools.private import restore_location
from ampcheck.torchtools.storage import storage_number, unwrapped

_DEVICE = re.compile(r"(cuda|xpu|mps)(?::(\d+))?")

HOST = -1
"""In the place of an index: on the CPU."""

_devices: StorageMap[int] = StorageMap()
"""The index of the device on which a storage was placed. It outlives a block, as tensors do."""


def place_storage(tensor: torch.Tensor, index: int) -> None:
    """Record the device of a tensor, and of all views of it."""
    _devices.put(unwrapped(tensor), index)


def any_placed() -> bool:
    """Return whether any tensor that lives was placed."""
    return bool(_devices)


def is_placed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was placed on a device, in a block of `placed`."""
    return bool(_devices) and device_index(tensor) is not None


def device_index(tensor: torch.Tensor) -> int | None:
    """The index of the device of a tensor, None on the CPU.

    Compiled code calls no mode; its results that have a gradient are known by their autograd node, and are placed.
    """
    tensor = unwrapped(tensor)
    index = _devices.get(tensor)
    if index is None and type(tensor.grad_fn).__name__ == "CompiledFunctionBackward":
        index = 0
        _devices.put(tensor, index)
    return index


def number(tensor: torch.Tensor) -> int:
    """A number that all views of a tensor share."""
    return storage_number(unwrapped(tensor)) or id(tensor)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            if isinstance(item, (torch.Tensor, tuple, list, dict)):
                yield from tensors(item)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))


def index_of(device: Any) -> int:
    """The index of a device of the kind that is placed, `HOST` for another one."""
    if isinstance(device, int):
        return device
    text = _DEVICE.fullmatch(str(device))
    if text is None or text[1] != placed_kind():
        return HOST
    return int(text[2]) if text[2] else current_device()


def is_placed_text(value: Any) -> bool:
    """Return whether a value is the name of a device of the kind that is placed."""
    return type(value) is str and (text := _DEVICE.fullmatch(value)) is not None and text[1] == placed_kind()


def replaced_storages() -> Iterator[Any]:
    """The functions that read storages from files, or move one."""
    yield replaced(torch, "load", _make_load)
    yield replaced(torch.serialization, "load", _make_load)
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        yield replaced(storage, "cuda", _make_storage_cuda)


def _make_storage_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    def cuda(storage: Any, *args: Any, **kwargs: Any) -> Any:
        _devices.put(getattr(storage, "_untyped_storage", storage), current_device())
        return storage

    return cuda


def _make_load(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load`: what a file or `map_location` puts on the device is placed there."""

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        def locate(storage: Any, location: str) -> Any:
            if callable(map_location):
                return map_location(storage, location)
            wanted = map_location.get(location, location) if isinstance(map_location, Mapping) else map_location
            index = index_of(location if wanted is None else wanted)
            if index == HOST:
                restore: Any = restore_location  # untyped
                return restore(map_location)(storage, location)
            _devices.put(storage, index)
            return storage

        return original(f, locate, *args, **kwargs)

    return load
