"""Tensors inside whatever a model takes and returns: tuples, dicts, dataclasses, model outputs, plain objects."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import BuiltinMethodType, MemberDescriptorType
from typing import Any

import torch

from ampcheck.torchtools.closures import CALLABLES, children, in_slots, is_users_class
from ampcheck.torchtools.storage import has_memory


def tensors(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor inside `value` and its path (`logits`, `hidden_states.2`, `0.boxes`; `''` for a bare one).

    A structure that contains itself is followed once.
    """
    return ((path, leaf) for path, leaf in _leaves(value, path, _items) if isinstance(leaf, torch.Tensor))


def results(value: object) -> Iterator[tuple[str, Any]]:
    """Every tensor inside what a call returned, those of closures and of callable objects included, and what may hold
    others that are not followed, such as an iterator."""
    for path, leaf in _leaves(value, "", _result_items):
        if isinstance(leaf, (torch.Tensor, Iterator, set, frozenset)):
            yield path, leaf


def _leaves(
    value: object,
    path: str,
    items: Callable[[object], Iterable[tuple[Any, object]]],
    above: frozenset[int] = frozenset(),
) -> Iterator[tuple[str, object]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif id(value) not in above:
        inner, leaf = above | {id(value)}, True
        for key, item in items(value):
            leaf = False
            yield from _leaves(item, f"{path}.{key}" if path else str(key), items, inner)
        if leaf:
            yield path, value


def map_tensors(function: Callable[[torch.Tensor], Any], value: object, above: frozenset[int] = frozenset()) -> Any:
    """A copy of the structure `value` with `function` applied to every tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if id(value) in above or not any(True for _ in tensors(value)):
        return value
    above |= {id(value)}
    items = {key: map_tensors(function, item, above) for key, item in _items(value)}
    if isinstance(value, tuple):
        return type(value)(*items.values()) if hasattr(value, "_fields") else type(value)(items.values())
    if isinstance(value, (set, frozenset)):
        return type(value)([*items.values(), *(item for item in value if not isinstance(item, torch.Tensor))])
    twin = copy.copy(value)  # keeps other contents of a subclass or a deque, such as its `maxlen`
    if isinstance(value, (list, deque, Mapping)):
        for key, item in items.items():
            twin[key] = item  # type: ignore[index, unused-ignore]  # containers of tensors can be written to
        return twin
    for key, item in items.items():
        if key in getattr(twin, "__dict__", ()):
            vars(twin)[key] = item  # also where the dataclass is frozen, or a property hides the field
        else:
            object.__setattr__(twin, key, item)
    return twin


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether ops can read the values of a tensor: strided, on a device, not quantised, nested or a wrapper."""
    plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
    return plain and has_memory(tensor)


def like(tensor: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    """A twin of a tensor, with the class and the attributes of its own that the tensor has."""
    kind = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return twin
    twin = torch.Tensor.as_subclass(twin, kind)
    vars(twin).update(vars(tensor))
    return twin


def _items(value: object) -> Iterator[tuple[Any, object]]:
    if isinstance(value, Mapping):  # before dataclass: transformers' ModelOutput is both, and hides its None fields
        yield from value.items()
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, (list, tuple, deque)):
        yield from enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _fields(value)
    elif hasattr(value, "__dict__") and not callable(value) and not isinstance(value, (type, torch.nn.Module)):
        yield from vars(value).items()  # a cache, a batch; no module, class, function or distribution
        yield from _filled(value)
    elif isinstance(value, (set, frozenset)):
        yield from _told_apart(value)
    elif not callable(value):
        yield from _filled(value)


def _fields(value: Any) -> Iterator[tuple[str, object]]:
    """The fields of a dataclass. One may be hidden by a property that raises: the attributes of the instance count."""
    attributes = getattr(value, "__dict__", {})
    for field in fields(value):
        slot = getattr(type(value), field.name, None)
        if field.name in attributes:
            yield field.name, attributes[field.name]
        elif isinstance(slot, MemberDescriptorType) and hasattr(value, field.name):  # a slot that was filled
            yield field.name, getattr(value, field.name)


def _filled(value: object) -> Iterator[tuple[str, object]]:
    return ((slot.__name__, content) for slot, content in in_slots(value))


def _told_apart(value: Collection[object]) -> Iterator[tuple[str, object]]:
    """The tensors of a set by dtype and shape; none where two are alike, as the order of a set differs between runs."""
    named = [
        (f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}", t) for t in value if isinstance(t, torch.Tensor)
    ]
    if len({name for name, _ in named}) == len(named):
        yield from named


def _result_items(value: object) -> Iterable[tuple[Any, object]]:
    if isinstance(value, (*CALLABLES, BuiltinMethodType)):
        owner = getattr(value, "__self__", None)
        return [("self", owner)] if owner is not None else children(value, read_globals=False)
    if callable(value) and is_users_class(type(value)) and not isinstance(value, (type, torch.nn.Module)):
        return [*getattr(value, "__dict__", {}).items(), *_filled(value)]
    return _items(value)
