"""The plain, real, strided tensor with the values of any tensor, or the reason why there is none."""

from __future__ import annotations

import sys
from typing import cast

import torch

from ampcheck.records.health import Unmeasured
from ampcheck.torchtools.private import is_transformed_tensor, without_subclass_function

_MEASURED = frozenset(
    getattr(torch, name)
    for name in (
        *("float64", "float32", "bfloat16", "float16"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    )
    if hasattr(torch, name)  # float8_e8m0fnu came with PyTorch 2.7
)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def values_of(tensor: torch.Tensor) -> torch.Tensor | Unmeasured:
    """Return the real strided tensor with the values of ``tensor``, without a copy and without a transfer.

    A complex tensor gives its real view: two elements for one. A DTensor gives its local shard, unless that is itself
    unmeasurable, without gathering. A sparse tensor gives its stored values. A jagged nested tensor gives its buffer.
    """
    if type(tensor) not in _PLAIN:
        unwrapped = _unwrap(tensor)
        return unwrapped if isinstance(unwrapped, Unmeasured) else values_of(unwrapped)
    if tensor.device.type == "meta":
        return Unmeasured("a meta tensor has no data")
    if is_transformed_tensor(tensor):
        return Unmeasured("a function transform (vmap, grad, functionalize) hides its data")
    if tensor.is_nested:
        return Unmeasured("a nested tensor of strided layout has no single buffer; measure the parts of unbind()")
    if tensor.is_quantized:
        return Unmeasured(f"it is quantised ({_name(tensor)}); measure the result of dequantize()")
    if tensor.layout is not torch.strided:
        stored = _stored(tensor)
        return stored if isinstance(stored, Unmeasured) else values_of(stored)
    if tensor.dtype.is_complex:
        # Conjugation changes signs alone, which do not count here; undoing it avoids a copy.
        return torch.view_as_real((tensor.conj() if tensor.is_conj() else tensor).detach())
    if tensor.dtype not in _MEASURED:
        return Unmeasured(f"elements of dtype {_name(tensor)} have no one numerical value each")
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return Unmeasured("its storage was freed (resized to 0, as sharded training does between uses)")
    return tensor


@torch.no_grad()
def _unwrap(tensor: torch.Tensor) -> torch.Tensor | Unmeasured:
    """Return the tensor inside a subclass."""
    kind = type(tensor).__name__
    to_local = getattr(tensor, "to_local", None)
    if to_local is not None:  # a DTensor
        return cast("torch.Tensor", to_local())
    # Importing the module takes seconds; a tensor of its class can exist only where it was imported.
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None and isinstance(tensor, collectives.AsyncCollectiveTensor):
        return Unmeasured("its collective may still be running; measure the result of wait()")
    if torch.nn.parameter.is_lazy(tensor):
        return Unmeasured("a lazy parameter has no data before the first forward")
    if tensor.is_nested and tensor.layout is torch.jagged:
        if tensor.lengths() is not None:  # type: ignore[attr-defined]
            return Unmeasured("a jagged tensor with lengths has gaps in its buffer; measure the parts of unbind()")
        return tensor.values()
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        with without_subclass_function():
            return tensor.as_subclass(torch.Tensor)
    if kind == "FakeTensor":
        return Unmeasured("a fake tensor has no data")
    return Unmeasured(f"a {kind} keeps its values in inner tensors; measure those")


def _stored(tensor: torch.Tensor) -> torch.Tensor | Unmeasured:
    if tensor.layout is torch.sparse_coo and not tensor.is_coalesced():
        return Unmeasured("a sparse tensor that is not coalesced stores summands; measure the result of coalesce()")
    if tensor.layout in _SPARSE:
        return tensor.detach().values()
    return Unmeasured(
        f"its layout {str(tensor.layout).removeprefix('torch.')} is opaque; measure the result of to_dense()"
    )


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
