"""What a user hands over, as a mapping of names to values: modules, tensors, the states of optimizers and scalers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from global_state import Same

_OF_DYNAMO = ("_torch", "_is_torch_compile", "_dynamo_")
"""Attributes that `torch.compile` itself gives to a module or a tensor."""


def of_module(module: torch.nn.Module) -> dict[str, Any]:
    """What a module of the user's holds: values and identities of its tensors, hooks, modes, names of attributes."""
    values: dict[str, Any] = {}
    for path, part in module.named_modules():
        values[f"{path}: attributes"] = sorted(name for name in vars(part) if not name.startswith(_OF_DYNAMO))
        values[f"{path}: training"] = part.training
        values[f"{path}: class"] = Same(type(part))
        for name, table in vars(part).items():
            if "_hooks" in name and isinstance(table, dict):
                values[f"{path}: {name}"] = [(key, id(hook)) for key, hook in table.items()]
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            values.update((f"{kind} {name}: {what}", value) for what, value in of_tensor(tensor).items())
    return values


def of_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """Bits, identity, storage, gradient, hooks and names of the attributes of one tensor."""
    grad = tensor.grad if tensor.is_leaf else None
    return {
        "itself": Same(tensor),
        "bits": bits(tensor),
        "storage": tensor.data_ptr(),
        "dtype": tensor.dtype,
        "strides": tensor.stride(),
        "requires grad": tensor.requires_grad,
        "gradient": Same(grad),
        "bits of the gradient": None if grad is None else bits(grad),
        "hooks": list((tensor._backward_hooks or {}).items()),
        "hooks after accumulation": list((tensor._post_accumulate_grad_hooks or {}).items()),
        "attributes": sorted(name for name in vars(tensor) if not name.startswith(_OF_DYNAMO)),
    }


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def of_state(value: Any) -> Any:
    """A copy of a container that can be compared: tensors as bits."""
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, Mapping):
        return {key: of_state(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [of_state(one) for one in value]
    with suppress(Exception):
        return value
    return None
