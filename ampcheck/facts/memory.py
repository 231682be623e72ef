"""The memory of tensors: which part of a flat companion belongs to a tensor, and the numbers in a storage.

The companions of sparse and nested tensors are those of the strided tensor that holds their values.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from ampcheck.core.formats import format_of
from ampcheck.torchtools.private import NO_DISPATCH, is_transformed_tensor, negative_view, nested_view
from ampcheck.torchtools.pytree import is_plain
from ampcheck.torchtools.storage import has_memory

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def finite(tensor: torch.Tensor) -> torch.Tensor:
    """Which elements are finite; PyTorch has no kernel for 8 bits."""
    return (tensor if tensor.dtype.itemsize > 1 else tensor.to(torch.float32)).isfinite()


def view_of(tensor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """The part of flat companions that belongs to a tensor, with its shape, strides and conjugation."""
    if tensor.is_complex():
        strides = [2 * stride for stride in tensor.stride()]
        pairs = flat.as_strided((*tensor.size(), 2), (*strides, 1), 2 * tensor.storage_offset())
        view = torch.view_as_complex(pairs)
        view = view.conj() if tensor.is_conj() else view
    else:
        view = flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return negative_view(view) if tensor.is_neg() else view


def write_view(tensor: torch.Tensor, flat: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into the part of flat companions that belongs to a tensor, once where its elements share memory."""
    view = view_of(tensor, flat)
    if 0 in tensor.stride():  # an expanded tensor, which PyTorch refuses to write
        values = values.expand(view.shape)
        for dim, stride in enumerate(tensor.stride()):
            if not stride and view.size(dim):
                view, values = view.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    view.copy_(values)


def has_companions(value: object) -> bool:
    """Return whether a value is a floating tensor that can have companions: with memory, strided, on a device."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    if value.layout is not torch.strided or value.is_nested or value.is_meta or value._is_zerotensor():
        return False
    if is_transformed_tensor(value) or not (type(value).__torch_dispatch__ is NO_DISPATCH or has_memory(value)):
        return False  # the tensor inside has
    return value.untyped_storage().nbytes() > 0 or value.numel() == 0


@cache
def roundoff(dtype: torch.dtype) -> float:
    """The unit roundoff of a floating or complex dtype."""
    return format_of(dtype.to_real()).unit_roundoff


def values_in(storage: torch.UntypedStorage, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """All numbers in a storage."""
    flat = torch.empty(0, dtype=dtype, device=device)
    return flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))


@cache
def largest_number(dtype: torch.dtype) -> float:
    """The largest number of a floating dtype."""
    return format_of(dtype).max


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """`float16` for `torch.float16`."""
    return str(dtype).removeprefix("torch.")


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


def parts_of(tensor: torch.Tensor, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with memory that hold the values of a tensor, by their paths.

    That is itself, the values of a sparse or nested one, or what a wrapper wraps. One that cannot be opened is its own.
    """
    prefix = f"{path}." if path else ""
    if is_plain(tensor):
        yield path, tensor
    elif (values := values_of(tensor) if has_memory(tensor) else None) is not None:
        yield f"{prefix}values", values
    else:
        inside = [(name, value) for name, value in _wrapped(tensor) if value is not tensor]
        for name, value in inside:
            yield from parts_of(value, f"{prefix}{name.strip('_')}")
        if not inside:
            yield path, tensor


def _wrapped(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensors inside a wrapper: those that it names to the compiler, or else its attributes."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else list(vars(tensor))
    attributes = ((name, getattr(tensor, name, None)) for name in names)
    return [(name, value) for name, value in attributes if isinstance(value, torch.Tensor)]


def with_values(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A tensor with the layout and the pattern of another, and other values."""
    if tensor.is_nested:
        return nested_view(
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
