"""The memory of tensors: which share it, and which part of a sharded one is on this process."""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import torch

from ampcheck.torchtools.private import NO_DISPATCH, FakeTensor, is_transformed_tensor, transformed_from, transforms

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
    """Return whether the values of a tensor can be read from its storage; a wrapper around other tensors has none of
    its own, though its storage has a size, and reading it ends the process."""
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
    """Return whether a tensor contains addends that are still to be summed over processes (`Partial`)."""
    return any(part.is_partial() for part in placements(tensor))


def is_transformed() -> bool:
    """Return whether a function transform (`torch.func.vmap`, `grad`, `jvp`) runs: values may not leave its tensors."""
    return transforms() is not None
