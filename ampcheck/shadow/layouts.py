"""Sparse and nested tensors: their companions are those of the strided tensor that holds their values."""

from __future__ import annotations

import torch

from ampcheck.shadow.memory import values_in

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a sparse or nested tensor, in the same memory; None for other layouts, such as that of oneDNN."""
    if tensor.is_nested:
        if tensor.layout is not torch.strided or tensor.is_meta:
            return None
        return values_in(tensor.untyped_storage(), tensor.dtype, tensor.device)
    if tensor.is_meta:
        return None
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor.values() if tensor.layout in _COMPRESSED else None


def with_values(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A tensor with the layout and the pattern of another, and other values."""
    if tensor.is_nested:
        return torch._nested_view_from_buffer(
            values.contiguous(),
            tensor._nested_tensor_size(),
            tensor._nested_tensor_strides(),
            tensor._nested_tensor_storage_offsets(),
        )
    if tensor.layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(
            tensor._indices(), values, tensor.shape, check_invariants=False, is_coalesced=tensor.is_coalesced()
        )
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    ends, others = (
        (tensor.crow_indices(), tensor.col_indices()) if by_row else (tensor.ccol_indices(), tensor.row_indices())
    )
    return torch.sparse_compressed_tensor(
        ends, others, values, tensor.shape, layout=tensor.layout, check_invariants=False
    )
