"""What a snapshot saves of one object: a tensor, a module, a container, a function, a class, a random generator.

Each `save_...` function returns a function, or a list of them, that restores what it saved.
"""

from __future__ import annotations

import functools
import itertools
import random
import types
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeAlias

import torch

from ampcheck.torchtools.closures import cell_content, globals_read, in_slots
from ampcheck.torchtools.reachable import (
    CONTAINERS,
    DISTRIBUTED,
    is_array,
    is_distributed,
    is_random_generator,
    module_attributes,
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
    """Whether a tensor has the memory of `data`; True for subclasses that cannot compare it."""
    with suppress(Exception):
        return tensor.is_set_to(data)
    return True


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype contain the same bits, NaN for NaN; False where unreadable."""
    with suppress(Exception):
        return torch.equal(_bytes(first), _bytes(second))
    return False


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor).contiguous().reshape(-1).view(torch.uint8)


def tensors_in(value: object, depth: int = 5) -> Iterator[torch.Tensor]:
    """The tensors in a container, and in those inside it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (*CONTAINERS, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(inner, depth - 1)


def save_module(module: torch.nn.Module) -> list[Restore]:
    """Save which parameters, buffers and parts one module has, its mode, and its own attributes.

    Attributes of a distributed wrapper are left alone: they belong to operations that other processes have begun.
    """
    restores = [save_items(table) for table in (module._parameters, module._buffers, module._modules)]
    restores.append(functools.partial(setattr, module, "training", module.training))
    if is_distributed(module):
        return restores
    before = module_attributes(module)

    def restore_attributes() -> None:
        attributes = vars(module)
        for name in module_attributes(module).keys() - before.keys():
            if not name.startswith("_torch"):
                del attributes[name]
        attributes.update(before)

    return [*restores, restore_attributes, *save_inside(before, set())]


def save_object(value: Any, *, deep: bool = False) -> list[Restore]:
    """Save the contents of a function, class, array, random generator, container or object.

    deep: also containers inside containers.
    """
    if isinstance(value, types.FunctionType):
        return _save_function(value)
    if isinstance(value, type):
        return [_save_class(value)]
    if is_array(value):
        return [functools.partial(value.__setitem__, ..., value.copy())]
    if is_random_generator(value):
        return [functools.partial(_set_generator, value, generator_state(value))]
    if isinstance(value, tuple):
        return []
    restores: list[Restore] = [_save_slots(value)]
    for table in (value, getattr(value, "__dict__", None)):
        if isinstance(table, CONTAINERS):
            restores += [save_items(table), *(save_inside(table, set()) if deep else ())]
    return restores


def _save_slots(value: object) -> Restore:
    before = dict(in_slots(value))

    def restore() -> None:
        for slot, _ in in_slots(value):
            if slot not in before:
                slot.__delete__(value)
        for slot, content in before.items():
            slot.__set__(value, content)

    return restore


def _save_function(function: types.FunctionType) -> list[Restore]:
    """Save closure, globals and attributes, but no functions, classes and modules: others may have replaced these."""
    kinds = (types.ModuleType, torch.nn.Module)
    before = {n: v for n, v in globals_read(function).items() if not callable(v) and not isinstance(v, kinds)}

    def restore_globals() -> None:
        for name, value in before.items():
            if function.__globals__.get(name, function) is not value:
                function.__globals__[name] = value

    attributes = [save_items(vars(function))] if is_users(function.__code__.co_filename) else []
    return [*save_cells(function), restore_globals, *attributes]


def save_cells(function: types.FunctionType) -> list[Restore]:
    """Save the contents of a function's closure."""
    cells = [(cell, content) for cell in function.__closure__ or () for content in cell_content(cell)]
    return [functools.partial(setattr, cell, "cell_contents", content) for cell, content in cells]


def _save_class(kind: type) -> Restore:
    before = plain_attributes(kind)

    def restore() -> None:
        now = plain_attributes(kind)
        for name in now.keys() - before.keys():
            delattr(kind, name)
        for name, value in before.items():
            if now.get(name, restore) is not value:
                setattr(kind, name, value)

    return restore


def save_inside(container: Any, seen: set[int]) -> list[Restore]:
    """Save the containers inside a container, by whatever path; `seen` are the ids of those already saved."""
    seen.add(id(container))
    restores: list[Restore] = []
    for value in container.values() if isinstance(container, dict) else container:
        if isinstance(value, CONTAINERS) and id(value) not in seen:
            restores += [save_items(value), *save_inside(value, seen)]
    return restores


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
        return [part for item in container.items() for part in item]
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
_FLAG = "_is_full_backward_hook"

_Table: TypeAlias = "dict[int, Any]"


def save_module_hooks(module: torch.nn.Module) -> Restore:
    """Return a function that restores the hooks of one module, with their flags and in their order."""
    if is_distributed(module):
        return lambda: None
    restore_tables = _save(module, MODULE_TABLES)
    flag = vars(module).get(_FLAG)

    def restore() -> None:
        restore_tables()
        if _FLAG in vars(module):
            vars(module)[_FLAG] = flag

    return restore


def save_tensor_hooks(tensor: torch.Tensor) -> Restore:
    """Return a function that restores the hooks of one tensor; a tensor without a table has none again."""
    return _save(tensor, TENSOR_TABLES)


def _save(owner: torch.nn.Module | torch.Tensor, names: tuple[str, ...]) -> Restore:
    tables = {name: _table(owner, name) for name in names}
    foreign = _foreign(tables)
    before = {name: {k: v for k, v in (table or {}).items() if k not in foreign} for name, table in tables.items()}

    def restore() -> None:
        now = {name: _table(owner, name) for name in names}
        foreign = _foreign(now)
        for name, table in tables.items():
            wanted, present = table, now[name]
            if table is None and (not foreign.isdisjoint(present or ()) or getattr(owner, "is_leaf", True) is False):
                wanted = present
            if wanted is not None:
                _refill(wanted, present or {}, before[name], foreign)
            if wanted is not present:
                setattr(owner, name, wanted)

    return restore


def _table(owner: torch.nn.Module | torch.Tensor, name: str) -> _Table | None:
    with suppress(Exception):  # a subclass of tensors may refuse
        table: _Table | None = getattr(owner, name)
        return table
    return None


def _refill(table: _Table, now: _Table, before: _Table, foreign: set[int]) -> None:
    """Restore a table's entries; foreign hooks stay, before the rest or behind it."""
    own = [(number, id(hook)) for number, hook in now.items() if number not in foreign]
    if table is now and own == [(number, id(hook)) for number, hook in before.items()]:
        return
    first = dict(itertools.takewhile(lambda item: item[0] in foreign, now.items()))
    last = {number: hook for number, hook in now.items() if number in foreign and number not in first}
    table.clear()
    for part in (first, before, last):
        table.update(part)


def _foreign(tables: dict[str, _Table | None]) -> set[int]:
    return {number for table in tables.values() for number, hook in (table or {}).items() if _is_foreign(hook)}


def _is_foreign(hook: object) -> bool:
    """Whether a hook belongs to ampcheck or to a distributed wrapper."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return f"{getattr(hook, '__module__', '')}.".startswith(("ampcheck.", *DISTRIBUTED))
