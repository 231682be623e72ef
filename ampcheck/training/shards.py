"""What of a distributed tensor this process holds, told from its placements alone: nothing is gathered."""

from __future__ import annotations

import sys
from typing import Any

import torch


def placements(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The placements of a DTensor, one for each dimension of its mesh; of any other tensor none."""
    # A DTensor can only exist where somebody has imported its module, and importing it takes seconds.
    homes = ("torch.distributed.tensor", "torch.distributed._tensor")  # the second up to torch 2.4
    kind = next((c for home in homes if (c := getattr(sys.modules.get(home), "DTensor", None))), None)
    return tuple(tensor.placements) if kind is not None and isinstance(tensor, kind) else ()


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether other processes hold other elements of this tensor."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    return any(not one.is_replicate() and mesh.size(place) > 1 for place, one in enumerate(placements(tensor)))


def is_pending(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds addends that are still to be summed over processes (`Partial`)."""
    return any(one.is_partial() for one in placements(tensor))


def holds_first_copy(tensor: torch.Tensor) -> bool:
    """Whether this process is the one that counts the elements it holds.

    Along each dimension of the mesh over which the tensor is replicated, that is the first process. A tensor without
    placements is replicated over all processes, as under DDP: the first of them counts it.
    """
    told = placements(tensor)
    if not told:
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        return not ready or torch.distributed.get_rank() == 0
    here = tensor.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    if here is None:  # this process is not part of the mesh
        return False
    return all(not one.is_replicate() or here[place] == 0 for place, one in enumerate(told))
