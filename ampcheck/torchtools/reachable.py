"""The objects that a training step can reach and change, by name."""

from __future__ import annotations

import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any
from weakref import ProxyTypes

import torch
from torch.optim.lr_scheduler import LRScheduler

from ampcheck.torchtools.closures import CALLABLES, children, is_followed, is_users_class
from ampcheck.torchtools.dynamo import is_compiled, uncompiled

CONTAINERS = (dict, list, set, deque)
"""Types whose contents a step may replace, subclasses included."""

_FOLLOWED = (set, deque, OrderedDict, defaultdict, Counter, types.SimpleNamespace)
"""Types of the standard library that are followed, besides those of `closures.is_followed`."""

DISTRIBUTED = ("torch.distributed.", "torch.nn.parallel.")

OWNERS = (torch.optim.Optimizer, LRScheduler)

_OF_TORCH: Mapping[type, str] = {
    torch.Tensor: "tensors",
    torch.optim.Optimizer: "optimizers",
    torch.amp.GradScaler: "scalers",
    LRScheduler: "schedulers",
}
"""Where `Reached` keeps the objects of a type."""
_KINDS = tuple(_OF_TORCH)

_VALUE_LIMIT = 20_000
"""A step that reaches more values than this contains data, or a whole program."""

_LARGE = 1 << 26
"""Bytes. A larger numpy array is data, and is not copied."""

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


@dataclass(slots=True)
class Reached:
    """The objects that a step can reach, each once, by the path that leads to it (`model`, `optimizer`, `trainer.ema`).

    tensors: those that belong to no module, optimizer or scaler. unseen: whether there were more values than are
    followed. compiled: the modules and functions that are compiled. opaque: types of the iterators and files, which
    cannot be restored. values: all that a snapshot saves, the modules and containers themselves and what they lead to,
    also what only attributes of modules and classes lead to, which no check judges.
    """

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    scalers: dict[str, Any] = field(default_factory=dict)
    schedulers: dict[str, LRScheduler] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    unseen: bool = False
    compiled: dict[str, object] = field(default_factory=dict)
    opaque: dict[str, str] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)

    @property
    def generators(self) -> list[Any]:
        """The random generators of the step's own."""
        return [value for value in self.values if is_random_generator(value)]


def reach(roots: Mapping[str, object], *, within: bool = True, near: bool = False) -> Reached:
    """Everything that the values of a mapping lead to, as `closures.children` follows them.

    Tensors of a module, an optimizer or a scaler belong to it. within: also what is inside the attributes of modules
    and classes. near: the nearest values first, and no global variables.
    """
    reached = Reached()
    seen: dict[int, object] = {}
    later = _follow(roots.items(), reached, seen, near)
    _remove_owned(reached)
    inner = Reached(unseen=reached.unseen, opaque=reached.opaque, values=reached.values)
    while within and later:
        later = _follow(later, inner, seen, near)
    reached.unseen = inner.unseen
    return reached


def _follow(
    start: Iterable[tuple[str, object]], reached: Reached, seen: dict[int, object], near: bool
) -> list[tuple[str, object]]:
    """Add everything that values lead to; return the attributes of modules and the classes of objects."""
    before, waiting = len(seen), deque(start)
    later: list[tuple[str, object]] = []
    while waiting:
        path, value = waiting.popleft()
        if id(value) in seen or type(value) in ProxyTypes or _is_namespace(value):  # a proxy's object is reached itself
            continue
        if len(seen) - before > _VALUE_LIMIT:
            reached.unseen = True
            break
        seen[id(value)] = value  # kept alive: its id is not reused
        if isinstance(value, torch.nn.Module):
            later += _follow_module(path, value, reached, seen)
        elif isinstance(value, _KINDS):
            known = getattr(reached, _OF_TORCH[next(filter(partial(isinstance, value), _KINDS))])
            known[_free(path, known)] = value
            reached.values.append(value)
            waiting.extend(_wrapped(path, value) if isinstance(value, OWNERS) else ())
        elif is_random_generator(value) or is_array(value):
            reached.values.append(value)
        elif isinstance(value, type):
            later += _follow_class(path, value, reached)
        elif is_followed(value) or type(value) in _FOLLOWED:
            later += _follow_object(path, value, reached)
            inside = children(value, path, read_globals=not near)
            inside += [(path, value.__func__)] if near and isinstance(value, types.MethodType) else []
            waiting.extend(inside) if near else waiting.extendleft(reversed(inside))
        elif isinstance(value, Iterator):
            reached.opaque[_free(path, reached.opaque)] = type(value).__name__
    return later


def _is_namespace(value: object) -> bool:
    """Return whether this is the namespace of a Python module (`vars(torch)`, `globals()`), or `sys.modules`."""
    return isinstance(value, dict) and (value is sys.modules or ("__name__" in value and "__spec__" in value))


def _follow_module(
    path: str, module: torch.nn.Module, reached: Reached, seen: dict[int, object]
) -> Iterator[tuple[str, object]]:
    for name, part in module.named_modules():
        if is_compiled(part):
            reached.compiled[_free(".".join(filter(None, (path, name))), reached.compiled)] = part
    inside = uncompiled(module)
    reached.modules[_free(path, reached.modules)] = inside
    reached.values.append(inside)
    seen[id(inside)] = inside
    return _in_modules(path, inside)


def _follow_class(path: str, kind: type, reached: Reached) -> list[tuple[str, object]]:
    if not is_users_class(kind) or issubclass(kind, Enum):
        return []
    reached.values.append(kind)
    attributes = [(f"{path}.{name}", attribute) for name, attribute in plain_attributes(kind).items()]
    return attributes + [(base.__name__, base) for base in kind.__mro__[1:]]


def _follow_object(path: str, value: object, reached: Reached) -> list[tuple[str, object]]:
    is_function = isinstance(value, types.FunctionType)
    if is_function and is_compiled(value):
        reached.compiled[_free(path, reached.compiled)] = value
    elif is_function:
        reached.values.append(value)
    elif not isinstance(value, CALLABLES):
        reached.values.append(value)
        return [(type(value).__name__, type(value))]
    return []


def _free(path: str, taken: Mapping[str, object]) -> str:
    """The path, numbered where it is taken: closures may use one name for different objects."""
    number, free = 2, path
    while free in taken:
        free, number = f"{path}#{number}", number + 1
    return free


def _in_modules(path: str, module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    """The attributes of a module's parts that are more than numbers and tensors, and the classes of the parts."""
    for name, part in module.named_modules():
        if is_distributed(part):
            continue
        yield type(part).__name__, type(part)
        for key, value in module_attributes(part).items():
            several = value.values() if isinstance(value, dict) else value
            is_container = isinstance(value, (dict, list, tuple, set, deque))
            if not _is_plain(value) and not (is_container and value and all(map(_is_plain, several))):
                yield ".".join(filter(None, (path, name, key))), value


def _is_plain(value: object) -> bool:
    """Return whether restoring a module's own attributes restores the value as well."""
    return value is None or isinstance(value, (bool, int, float, str, torch.Tensor, *CALLABLES))


def _wrapped(path: str, owner: object) -> list[tuple[str, Any]]:
    """Optimizers and schedulers inside another, to be followed last: those with a name of their own keep it."""
    named = vars(owner).items()
    return [
        (f"{path}.{name}", value)
        for name, value in named
        if isinstance(value, OWNERS)
        or (isinstance(value, (list, tuple)) and any(isinstance(part, OWNERS) for part in value))
    ]


def _remove_owned(reached: Reached) -> None:
    """Leave out modules that are part of another, and tensors of modules."""
    inner = {id(part) for module in reached.modules.values() for part in list(module.modules())[1:]}
    reached.modules = {path: module for path, module in reached.modules.items() if id(module) not in inner}
    owned = {id(t) for module in reached.modules.values() for t in (*module.parameters(), *module.buffers())}
    reached.tensors = {path: tensor for path, tensor in reached.tensors.items() if id(tensor) not in owned}


def is_distributed(module: torch.nn.Module) -> bool:
    """Return whether a module is a distributed wrapper of PyTorch, whose state belongs to other processes as well."""
    return f"{type(module).__module__}.".startswith(DISTRIBUTED)


def module_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes of a module besides those that every module has."""
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


def plain_attributes(kind: type) -> dict[str, Any]:
    """The values that a class itself contains: no functions, no descriptors, nothing of Python's own."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith(("__", "_abc_")) and not callable(value) and not hasattr(type(value), "__get__")
    }


def is_random_generator(value: object) -> bool:
    """Return whether a value is a random generator of PyTorch, Python or numpy whose state can be read."""
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *of_numpy)) and not isinstance(value, random.SystemRandom)


def is_array(value: Any) -> bool:
    """Return whether a value is a numpy array that may change and is small enough to copy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and value.flags.writeable and value.nbytes <= _LARGE


def own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the parts of a module have as plain attributes, by their paths; no results of a graph."""
    for name, part in module.named_modules():
        for key, value in module_attributes(part).items() if not is_distributed(part) else ():
            if isinstance(value, torch.Tensor) and value.grad_fn is None:
                yield f"{name}.{key}" if name else key, value
