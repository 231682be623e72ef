"""Tensors inside whatever a model takes and returns: tuples, dicts, dataclasses, model outputs, plain objects."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import MemberDescriptorType
from typing import Any


def tensors(value: Any, path: str = "", above: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Every tensor inside `value` and its path (`logits`, `hidden_states.2`, `0.boxes`; `''` for a bare one).

    A structure that contains itself is followed once.
    """
    if _is_tensor(value):
        yield path, value
    elif id(value) not in above:
        inner = above | {id(value)}
        for key, item in _items(value):
            yield from tensors(item, f"{path}.{key}" if path else str(key), inner)


def map_tensors(function: Callable[[Any], Any], value: Any, above: frozenset[int] = frozenset()) -> Any:
    """A copy of the structure `value` with `function` applied to every tensor; the original is left as it was."""
    if _is_tensor(value):
        return function(value)
    if id(value) in above or not any(True for _ in tensors(value)):
        return value
    above |= {id(value)}
    items = {key: map_tensors(function, item, above) for key, item in _items(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items.values())
    if isinstance(value, tuple):
        return type(value)(items.values())
    twin = copy.copy(value)  # keeps what else a subclass or a deque holds, such as its `maxlen`
    if isinstance(value, (list, deque, Mapping)):
        for key, item in items.items():
            twin[key] = item  # type: ignore[index, unused-ignore]  # what holds tensors can be written to
        return twin
    for key, item in items.items():
        if key in getattr(twin, "__dict__", ()):
            vars(twin)[key] = item  # also where the dataclass is frozen, or a property hides the field
        else:
            object.__setattr__(twin, key, item)
    return twin


def is_plain(tensor: Any) -> bool:
    """Whether a tensor has values that ops can read: strided, on a device, neither quantised nor nested."""
    import torch

    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):  # before dataclass: transformers' ModelOutput is both, and hides its None fields
        yield from value.items()
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, (list, tuple, deque)):
        yield from enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        # A field may be hidden by a property that raises: what the instance holds is what counts.
        held = getattr(value, "__dict__", {})
        for field in fields(value):
            if field.name in held:
                yield field.name, held[field.name]
            elif isinstance(getattr(type(value), field.name, None), MemberDescriptorType) and hasattr(
                value, field.name
            ):
                yield field.name, getattr(value, field.name)  # a slot; one that was never filled holds nothing
    elif _is_plain_object(value):
        yield from vars(value).items()


def _is_plain_object(value: Any) -> bool:
    """Instances that carry tensors in attributes (a cache, a batch), but no module, class, function or distribution."""
    import torch

    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, (type, torch.nn.Module))


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)
