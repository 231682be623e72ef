"""How each kind of thing is put back: tensors, modules, containers, objects, generators of random numbers."""

from __future__ import annotations

import functools
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ampcheck.torchtools.closures import in_slots
from ampcheck.training.hooks import DISTRIBUTED

CONTAINERS = (dict, list, set, deque)
"""What holds values that a step may replace, subclasses among them."""

_LARGE = 1 << 26
"""Bytes. A larger numpy array is data, and would be copied for nothing."""

_OF_MODULES = frozenset(vars(torch.nn.Module()))

Undo = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Globals:
    """Globals of a module that a function reads, by name."""

    inside: dict[str, Any]
    read: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OfClass:
    """What a class holds besides what its objects can do."""

    kind: type


def is_source(value: Any) -> bool:
    """Whether a value is a generator of random numbers, of PyTorch, Python or numpy, whose state can be read."""
    numpy = sys.modules.get("numpy")
    others = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *others)) and not isinstance(value, random.SystemRandom)


def is_array(value: Any) -> bool:
    """Whether a value is an array of numpy's that may change and is small enough to copy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and value.flags.writeable and value.nbytes <= _LARGE


def tensor_back(tensor: torch.Tensor) -> Undo:
    """Values, dtype, storage, gradient and `requires_grad` of one tensor."""
    value = _value_back(tensor)
    grad = tensor.grad if tensor.is_leaf else None
    grad_value = None if grad is None else _value_back(grad)
    wanted = tensor.requires_grad

    def back() -> None:
        with torch.no_grad():
            if not tensor.is_leaf:
                value()
                return
            if tensor.grad is not grad:
                tensor.grad = None  # one of another dtype would not let the values be put back
            if grad_value is not None:
                grad_value()
            value()
            if tensor.grad is not grad:
                tensor.grad = grad
            if tensor.requires_grad != wanted:
                tensor.requires_grad_(wanted)

    return back


class _Copy:
    """The values of one tensor at one time."""

    __slots__ = ("__weakref__", "of", "value")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.of = weakref.ref(tensor)
        self.value = tensor.detach().clone()


_copies: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()
"""The last copy of each tensor that a snapshot still needs, by the number of the tensor."""


def _copy_of(tensor: torch.Tensor) -> _Copy:
    """A copy, which nested snapshots share while the bits are the same: most of what a step reaches is its data.

    Versions of tensors would not do: `.data`, arrays of numpy's and kernels of extensions write without a new one.
    """
    last = _copies.get(id(tensor))
    if last is not None and last.of() is tensor and _is_like(tensor, last.value) and same_bits(tensor, last.value):
        return last
    copy = _Copy(tensor)
    _copies[id(tensor)] = copy
    return copy


def _is_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    if hasattr(one, "to_local"):  # equal parts of unequal wholes
        return False
    return (one.shape, one.dtype, one.device, one.layout) == (other.shape, other.dtype, other.device, other.layout)


def _value_back(tensor: torch.Tensor) -> Undo:
    with torch.no_grad():
        data, copy = tensor.detach(), _copy_of(tensor)

    def back() -> None:
        value = copy.value
        if tensor.dtype != data.dtype or tensor.shape != value.shape or not _is_set_to(tensor, data):
            tensor.data = data
        if tensor.is_meta or same_bits(tensor, value):
            return
        with torch.inference_mode(tensor.is_inference()):
            plain = tensor.data if tensor.requires_grad else tensor
            _once(plain).copy_(_once(value, plain.stride()) if plain.layout is torch.strided else value)

    return back


def _once(tensor: torch.Tensor, strides: tuple[int, ...] | None = None) -> torch.Tensor:
    """Each element of an expanded tensor once: what shows several times cannot be written to."""
    if tensor.layout is not torch.strided:
        return tensor
    for dim, stride in enumerate(tensor.stride() if strides is None else strides):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _is_set_to(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether both show the same memory; what cannot tell has kept it."""
    with suppress(Exception):
        return tensor.is_set_to(data)
    return True


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits, NaN for NaN; False where that cannot be told."""
    with suppress(Exception):
        return torch.equal(_bits(one), _bits(other))
    return False


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def module_back(module: torch.nn.Module) -> Undo:
    """What one module holds itself: parameters, buffers, parts, its mode, and attributes of its own.

    Of a module that PyTorch distributes, the attributes stay: they belong to what has begun on other processes.
    """
    own = (module._parameters, module._buffers, module._modules)
    tables = [_shallow_back(table) for table in own]
    training = module.training
    mine = f"{type(module).__module__}.".startswith(DISTRIBUTED)
    then = {} if mine else attributes(module)
    seen: set[int] = set()
    inner = [container_back(one, seen) for one in then.values() if isinstance(one, CONTAINERS) and id(one) not in seen]

    def back() -> None:
        for table in tables:
            table()
        module.training = training
        if mine:
            return
        held = vars(module)
        for name in attributes(module).keys() - then.keys():
            if not name.startswith("_torch"):
                del held[name]
        held.update(then)
        for one in inner:
            one()

    return back


def attributes(module: torch.nn.Module) -> dict[str, Any]:
    """What a module holds besides what every module has."""
    return {name: one for name, one in vars(module).items() if name not in _OF_MODULES}


def thing_back(thing: Any, *, deep: bool) -> Undo | None:
    """What a container, a cell, an object or a generator holds; deep: containers inside as well, each the same."""
    if isinstance(thing, types.CellType):
        return _cell_back(thing)
    if isinstance(thing, Globals):
        return _globals_back(thing)
    if isinstance(thing, OfClass):
        return _class_back(thing.kind)
    if is_array(thing):
        return _calling(functools.partial(thing.__setitem__, ...), thing.copy())
    if is_source(thing):
        return _calling(functools.partial(_put_state, thing), state_of_source(thing))
    if isinstance(thing, tuple):
        return None
    tables = [thing] if isinstance(thing, CONTAINERS) else []
    if hasattr(thing, "__dict__"):
        tables.append(vars(thing))
    undo = [container_back(one, set()) if deep else _shallow_back(one) for one in tables]
    undo.append(_slots_back(thing))

    def back() -> None:
        for one in undo:
            one()

    return back


def _slots_back(thing: Any) -> Undo:
    then = in_slots(thing)

    def back() -> None:
        for slot in in_slots(thing).keys() - then.keys():
            slot.__delete__(thing)
        for slot, one in then.items():
            slot.__set__(thing, one)

    return back


def plain_attributes(kind: type) -> dict[str, Any]:
    """What a class itself holds as values: no functions, no descriptors, nothing of Python's own."""
    return {
        name: one
        for name, one in vars(kind).items()
        if not name.startswith(("__", "_abc_")) and not callable(one) and not hasattr(type(one), "__get__")
    }


def _class_back(kind: type) -> Undo:
    then = plain_attributes(kind)

    def back() -> None:
        now = plain_attributes(kind)
        for name in now.keys() - then.keys():
            delattr(kind, name)
        for name, one in then.items():
            if now.get(name, back) is not one:
                setattr(kind, name, one)

    return back


def container_back(container: Any, seen: set[int]) -> Undo:
    """A container and those inside it, by whatever path; `seen` are the numbers of those that are taken care of."""
    seen.add(id(container))
    outer = _shallow_back(container)
    values = container.values() if isinstance(container, dict) else container
    inner = [container_back(one, seen) for one in values if isinstance(one, CONTAINERS) and id(one) not in seen]

    def back() -> None:
        outer()
        for one in inner:
            one()

    return back


def _shallow_back(container: Any) -> Undo:
    then = dict(container) if isinstance(container, dict) else list(container)

    def back() -> None:
        container.clear()
        if isinstance(container, (list, deque)):
            container.extend(then)
        else:
            container.update(then)

    return back


def _cell_back(cell: types.CellType) -> Undo | None:
    try:
        content = cell.cell_contents
    except ValueError:
        return None

    def back() -> None:
        cell.cell_contents = content

    return back


def _globals_back(names: Globals) -> Undo:
    """Functions, classes and modules stay: others may have put something in their place meanwhile."""
    then = {
        name: one
        for name, one in names.read.items()
        if not callable(one) and not isinstance(one, (types.ModuleType, torch.nn.Module))
    }

    def back() -> None:
        for name, one in then.items():
            if names.inside.get(name, back) is not one:
                names.inside[name] = one

    return back


def state_of_source(source: Any) -> Any:
    """What a generator of random numbers will draw next depends on this alone; it changes with every draw."""
    if isinstance(source, random.Random):
        return source.getstate()
    return source.bit_generator.state if hasattr(source, "bit_generator") else source.get_state()


def _put_state(source: Any, state: Any) -> None:
    if isinstance(source, random.Random):
        source.setstate(state)
    elif hasattr(source, "bit_generator"):
        source.bit_generator.state = state
    else:
        source.set_state(state)


def _calling(function: Callable[[Any], Any], value: Any) -> Undo:
    def back() -> None:
        function(value)

    return back


def tensors_in(value: Any, depth: int = 5) -> Iterator[torch.Tensor]:
    """The tensors in a container, and in those inside it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (*CONTAINERS, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one, depth - 1)
