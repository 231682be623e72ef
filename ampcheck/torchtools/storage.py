"""The memory of tensors: which share it, and which part of a sharded one is on this process."""

from __future__ import annotations

from typing import TypeAlias

import torch

Region: TypeAlias = "tuple[int, int, int]"
"""Number of the storage, offset and length in elements."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a `DTensor` that is on this process, detached; any other tensor itself, detached."""
    detached = tensor.detach()
    part = getattr(detached, "to_local", None)
    return detached if part is None else part()


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
