"""The memory of tensors: which share it, and which part of a sharded one is on this process."""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import torch

Region: TypeAlias = "tuple[int, int, int]"
"""Number of the storage, offset and length in elements."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a `DTensor` that is on this process, detached; any other tensor itself, detached."""
    detached = tensor.detach()
    part = getattr(detached, "to_local", None)
    return detached if part is None else part()


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside the wrappers of `torch.func` transforms, which have no storage; any other tensor itself."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


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
    homes = ("torch.distributed.tensor", "torch.distributed._tensor")  # the second up to torch 2.4
    kind = next((c for home in homes if (c := getattr(sys.modules.get(home), "DTensor", None))), None)
    return tuple(tensor.placements) if kind is not None and isinstance(tensor, kind) else ()


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether other processes have other elements of this tensor."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    return any(not part.is_replicate() and mesh.size(dim) > 1 for dim, part in enumerate(placements(tensor)))


def is_pending(tensor: torch.Tensor) -> bool:
    """Whether a tensor contains addends that are still to be summed over processes (`Partial`)."""
    return any(part.is_partial() for part in placements(tensor))


def holds_first_copy(tensor: torch.Tensor) -> bool:
    """Whether this process is the one that counts its elements of a tensor.

    Along each dimension of the mesh over which the tensor is replicated, that is the first process. A tensor without
    placements is replicated over all processes, as under DDP: the first of them counts it.
    """
    parts = placements(tensor)
    if not parts:
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        return not ready or torch.distributed.get_rank() == 0
    position = tensor.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    if position is None:  # this process is not part of the mesh
        return False
    return all(not part.is_replicate() or position[dim] == 0 for dim, part in enumerate(parts))
