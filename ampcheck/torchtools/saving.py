"""Saves one object for a snapshot: a tensor, a module, a container, a function, a class, a random generator.

Each `save_...` function returns a function, or a list of them, that restores what it saved.
"""

from __future__ import annotations

import random
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import torch

from ampcheck.torchtools.closures import cell_content, globals_read, in_slots
from ampcheck.torchtools.reachable import (
    CONTAINERS,
    DISTRIBUTED,
    is_array,
    is_distributed,
    is_random_generator,
    plain_attributes,
)
from ampcheck.torchtools.restore import Restore
from ampcheck.torchtools.source import is_users
from ampcheck.torchtools.storage import local


def save_tensor(tensor: torch.Tensor) -> Restore:
    """Save values, dtype, storage, gradient and `requires_grad` of one tensor."""
    restore_values = _save_values(tensor)
    gradient = tensor.grad if tensor.is_leaf else None
    restore_gradient = None if gradient is None else _save_values(gradient)
    requires_grad = tensor.requires_grad

    def restore() -> None:
        with torch.no_grad():
            if not tensor.is_leaf:
                restore_values()
                return
            if tensor.grad is not gradient:
                tensor.grad = None  # a gradient of another dtype would not let the values be restored
            if restore_gradient is not None:
                restore_gradient()
            restore_values()
            if tensor.grad is not gradient:
                tensor.grad = gradient
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)

    return restore


class _Copy:
    """The values of one tensor at one time."""

    __slots__ = ("__weakref__", "of", "values")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.of = weakref.ref(tensor)
        self.values = tensor.detach().clone()


_copies: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()
"""The last copy of each tensor that a snapshot still needs, by the `id` of the tensor."""


def _copy_of(tensor: torch.Tensor) -> _Copy:
    """A copy, which nested snapshots share while the bits are the same: most of what a step reaches is its data.

    Version counters do not show every write: `.data`, numpy arrays and kernels of extensions write without a new one.
    """
    last = _copies.get(id(tensor))
    if last is not None and last.of() is tensor and _is_like(tensor, last.values) and same_bits(tensor, last.values):
        return last
    copy = _copies[id(tensor)] = _Copy(tensor)
    return copy


def _is_like(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    if hasattr(tensor, "to_local"):  # equal parts of unequal tensors
        return False
    kind = (tensor.shape, tensor.dtype, tensor.device, tensor.layout)
    return kind == (copy.shape, copy.dtype, copy.device, copy.layout)


def _save_values(tensor: torch.Tensor) -> Restore:
    with torch.no_grad():
        data, copy = tensor.detach(), _copy_of(tensor)

    def restore() -> None:
        values = copy.values
        if tensor.dtype != data.dtype or tensor.shape != values.shape or not _shows(tensor, data):
            tensor.data = data
        if tensor.is_meta or same_bits(tensor, values):
            return
        with torch.inference_mode(tensor.is_inference()):
            plain = tensor.data if tensor.requires_grad else tensor
            _unexpanded(plain).copy_(_unexpanded(values, plain) if plain.layout is torch.strided else values)

    return restore


def _unexpanded(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Each element of an expanded tensor once, since expanded ones cannot be written to."""
    if tensor.layout is not torch.strided:
        return tensor
    for dim, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _shows(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Return whether a tensor has the memory of `data`; True for subclasses that cannot compare it."""
    with suppress(Exception):
        return tensor.is_set_to(data)
    return True


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype contain the same bits, NaN for NaN; False where unreadable."""
    with suppress(Exception):
        return torch.equal(_bytes(first), _bytes(second))
    return False


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor).contiguous().reshape(-1).view(torch.uint8)


_INSIDE = (torch.Tensor, tuple, *CONTAINERS)


def contained(values: Iterable[object], seen: set[int]) -> Iterator[Any]:
    """The containers and tensors among values, and inside these, through containers alone. seen: ids of those known."""
    for value in values:
        if isinstance(value, _INSIDE) and id(value) not in seen:
            seen.add(id(value))
            yield value
            if not isinstance(value, torch.Tensor):
                yield from contained(list(dict.values(value)) if isinstance(value, dict) else value, seen)


def save_object(value: Any, *, names: bool = True) -> list[Restore]:
    """Save what one object itself has: a function, class, array, random generator, container, module or other object.

    Tensors are saved one by one. names: also the globals that a function reads.
    """
    if isinstance(value, (torch.Tensor, tuple)):
        return []
    if isinstance(value, types.FunctionType):
        return _save_function(value, names)
    if isinstance(value, type):
        return [_save_names(partial(plain_attributes, value), partial(setattr, value), partial(delattr, value))]
    if is_array(value):
        return [partial(value.__setitem__, ..., value.copy())]
    if is_random_generator(value):
        return [partial(_set_generator, value, generator_state(value))]
    restores = [_save_slots(value), *([save_items(value)] if isinstance(value, CONTAINERS) else [])]
    table = getattr(value, "__dict__", None)
    if isinstance(table, dict):
        restores.append(_save_names(lambda: attributes(value), table.__setitem__, table.__delitem__))
    if isinstance(value, torch.nn.Module) and not is_distributed(value):
        restores.append(save_hooks(value, MODULE_TABLES))
    return restores


def _save_slots(value: object) -> Restore:
    return _save_names(
        lambda: dict(in_slots(value)),
        lambda slot, content: slot.__set__(value, content),
        lambda slot: slot.__delete__(value),
    )


def attributes(value: object) -> dict[str, Any]:
    """The attributes of an object that a snapshot saves and looks into; hooks are saved apart.

    Of a distributed wrapper of modules its parts and weights alone: the others belong to operations that other
    processes have begun.
    """
    if not isinstance(value, torch.nn.Module):
        return dict(vars(value))
    if is_distributed(value):
        return {name: vars(value)[name] for name in ("_parameters", "_buffers", "_modules", "training")}
    return {n: own for n, own in vars(value).items() if n not in MODULE_TABLES and not n.startswith("_torch")}


def _save_names(
    read: Callable[[], dict[Any, Any]], write: Callable[[Any, Any], object], delete: Callable[[Any], object]
) -> Restore:
    """Save what names stand for; one that was not there before is deleted."""
    before = read()

    def restore() -> None:
        now = read()
        for name in now.keys() - before.keys():
            delete(name)
        for name, value in before.items():
            if now.get(name, restore) is not value:
                write(name, value)

    return restore


def _save_function(function: types.FunctionType, names: bool) -> list[Restore]:
    """Save closure, globals and attributes, but no functions, classes and modules: others may have replaced these."""
    table, kinds = function.__globals__, (types.ModuleType, torch.nn.Module)

    def read() -> dict[str, Any]:
        return {n: v for n, v in globals_read(function).items() if not callable(v) and not isinstance(v, kinds)}

    cells = [(cell, content) for cell in function.__closure__ or () for content in cell_content(cell)]
    return [
        *(partial(setattr, cell, "cell_contents", content) for cell, content in cells),
        *([_save_names(read, table.__setitem__, table.__delitem__)] if names else []),
        *([save_items(vars(function))] if is_users(function.__code__.co_filename) else []),
    ]


def save_items(container: Any) -> Restore:
    """Save the elements of one container. One that has them still is not written: compiled code guards on it."""
    before = _items(container)

    def restore() -> None:
        now = _items(container)
        if len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True)):
            return
        container.clear()
        if isinstance(container, dict):
            container.update(zip(before[::2], before[1::2], strict=True))
        elif isinstance(container, set):
            container.update(before)
        else:
            container.extend(before)

    return restore


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [part for item in dict.items(container) for part in item]
    return list(container)


def generator_state(generator: Any) -> object:
    """The state of a random generator, which changes with every draw."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def _set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


MODULE_TABLES = tuple(
    name for name, table in vars(torch.nn.Module()).items() if "_hooks" in name and isinstance(table, dict)
)
TENSOR_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")

_Table: TypeAlias = "dict[int, Any]"


def save_hooks(owner: torch.nn.Module | torch.Tensor, names: tuple[str, ...]) -> Restore:
    """Save the hooks of one module or tensor, in their order; foreign ones stay, behind the others.

    A tensor without a table has none again.
    """
    tables = {name: _table(owner, name) for name in names}
    foreign = _foreign(tables)
    before = {name: {k: v for k, v in (table or {}).items() if k not in foreign} for name, table in tables.items()}

    def restore() -> None:
        now = {name: _table(owner, name) for name in names}
        foreign = _foreign(now)
        for name, table in tables.items():
            present = now[name]
            others = {number: hook for number, hook in (present or {}).items() if number in foreign}
            wanted = present if table is None and (others or getattr(owner, "is_leaf", True) is False) else table
            entries = {**before[name], **others}
            if wanted is not None and (wanted is not present or _ids(wanted) != _ids(entries)):
                wanted.clear()
                wanted.update(entries)
            if wanted is not present:
                setattr(owner, name, wanted)

    return restore


def _ids(table: _Table) -> set[tuple[int, int]]:
    return {(number, id(hook)) for number, hook in table.items()}


def _table(owner: torch.nn.Module | torch.Tensor, name: str) -> _Table | None:
    with suppress(Exception):  # a subclass of tensors may refuse
        table: _Table | None = getattr(owner, name)
        return table
    return None


def _foreign(tables: dict[str, _Table | None]) -> set[int]:
    return {number for table in tables.values() for number, hook in (table or {}).items() if _is_foreign(hook)}


def _is_foreign(hook: object) -> bool:
    """Return whether a hook belongs to ampcheck or to a distributed wrapper."""
    while isinstance(hook, partial):
        hook = hook.func
    return f"{getattr(hook, '__module__', '')}.".startswith(("ampcheck.", *DISTRIBUTED))
