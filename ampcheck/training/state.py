"""What a training step can reach and change, by name, and how all of it is put back as it was."""

from __future__ import annotations

import functools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from ampcheck.core.errors import UsageError
from ampcheck.torchtools import closures
from ampcheck.torchtools.dynamo import is_compiled, uncompiled
from ampcheck.torchtools.restore import random_back, switches_back
from ampcheck.torchtools.source import is_users
from ampcheck.training.hooks import DISTRIBUTED, module_hooks_back, tensor_hooks_back
from ampcheck.training.restore import (
    Globals,
    OfClass,
    attributes,
    is_array,
    is_source,
    module_back,
    plain_attributes,
    same_bits,
    tensor_back,
    tensors_in,
    thing_back,
)

_FOLLOWED = (set, deque, OrderedDict, defaultdict, Counter, types.SimpleNamespace)
"""Of the standard library, besides what `closures.may_hold` names."""

_SEVERAL = (list, tuple, set, deque)

_REACHED = 20_000
"""A step that reaches more values than this holds data, or a whole program."""


@dataclass(slots=True)
class Reached:
    """What a step can reach, each once, by the path that leads to it (`model`, `optimizer`, `trainer.ema`).

    tensors: those that belong to no module, optimizer or scaler. holders: dicts, lists, objects of the user's classes,
    and cells of closures, whose contents the step may replace. unseen: whether there was more than is followed.
    compiled: whether any module or function is compiled. within: what objects inside modules and the classes of objects
    lead to besides; it is put back, and no check looks at it. opaque: the kinds of iterators and
    files, which go on as they are.
    """

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    scalers: dict[str, Any] = field(default_factory=dict)
    schedulers: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    holders: list[Any] = field(default_factory=list)
    unseen: bool = False
    compiled: bool = False
    within: Reached | None = None
    opaque: dict[str, str] = field(default_factory=dict)


def reach(roots: Mapping[str, Any], *, within: bool = True) -> Reached:
    """Everything that the values of a mapping lead to.

    Followed are modules, optimizers, scalers, schedulers, tensors, and through functions (closures, defaults, the
    globals that code of the user's reads), bound methods, partials, lists, tuples, dicts and objects of the user's
    classes, as `ampcheck.torchtools.closures` follows them. Tensors of a module, an optimizer or a scaler are theirs.
    """
    found, inner = Reached(), Reached()
    seen: dict[int, Any] = {}
    later: list[tuple[str, Any]] = []
    _follow(list(roots.items()), found, seen, later)
    _leave_out_what_modules_own(found)
    if within:
        while later:
            now, later = later, []
            _follow(now, inner, seen, later)
        found.unseen = found.unseen or inner.unseen
        found.opaque.update(inner.opaque)
        found.within = inner
    return found


def _follow(start: list[tuple[str, Any]], found: Reached, seen: dict[int, Any], later: list[tuple[str, Any]]) -> None:
    """Add what values lead to. `later` takes what modules hold besides their weights, and the classes of objects."""
    before = len(seen)
    waiting = start[::-1]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen:
            continue
        if len(seen) - before > _REACHED:
            found.unseen = True
            break
        seen[id(value)] = value  # held, so that no other value gets its number meanwhile
        if isinstance(value, torch.Tensor):
            found.tensors[_free(path, found.tensors)] = value
        elif isinstance(value, torch.nn.Module):
            found.compiled = found.compiled or any(is_compiled(part) for part in (value, *value.modules()))
            inside = uncompiled(value)
            found.modules[_free(path, found.modules)] = inside
            seen[id(inside)] = inside
            later += _in_modules(path, inside)
        elif is_optimizer(value):
            found.optimizers[_free(path, found.optimizers)] = value
            waiting[:0] = _of_owner(path, value)
        elif is_scaler(value):
            found.scalers[_free(path, found.scalers)] = value
        elif isinstance(value, LRScheduler):
            found.schedulers[_free(path, found.schedulers)] = value
            waiting[:0] = _of_owner(path, value)
        elif is_source(value) or is_array(value):
            found.holders.append(value)
        elif isinstance(value, type):
            if closures.is_users_class(value) and not issubclass(value, Enum):
                found.holders.append(OfClass(value))
                later += [(f"{path}.{name}", one) for name, one in plain_attributes(value).items()]
                later += [(above.__name__, above) for above in value.__mro__[1:]]
        elif closures.may_hold(value) or type(value) in _FOLLOWED:
            found.compiled = found.compiled or (isinstance(value, types.FunctionType) and is_compiled(value))
            if not isinstance(value, closures.CALLABLES):
                found.holders.append(value)
                later.append((type(value).__name__, type(value)))
            waiting += reversed(list(_inside(path, value, found.holders)))
        elif isinstance(value, Iterator):
            found.opaque[_free(path, found.opaque)] = type(value).__name__


def _free(path: str, taken: Mapping[str, Any]) -> str:
    """The path, numbered where another stands there: closures may call different things by one name."""
    number, free = 2, path
    while free in taken:
        free, number = f"{path}#{number}", number + 1
    return free


def _in_modules(path: str, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """What the parts of a module hold that is more than numbers and tensors, and their classes."""
    for name, part in module.named_modules():
        kind = type(part)
        if f"{kind.__module__}.".startswith(DISTRIBUTED):
            continue
        yield kind.__name__, kind
        for key, one in attributes(part).items():
            several = one.values() if isinstance(one, dict) else one if isinstance(one, _SEVERAL) else ()
            if not _is_plain(one) and not (several and all(map(_is_plain, several))):
                yield ".".join(filter(None, (path, name, key))), one


def _is_plain(value: Any) -> bool:
    """Whether `module_back` alone puts a value back, or there is nothing that a step could change in it."""
    return value is None or isinstance(value, (bool, int, float, str, torch.Tensor, *closures.CALLABLES))


def only_sources(reached: Reached) -> Reached:
    """Of what was reached, the generators of random numbers alone."""
    inner = [] if reached.within is None else reached.within.holders
    return Reached(holders=[one for one in (*reached.holders, *inner) if is_source(one)])


def _of_owner(path: str, owner: Any) -> list[tuple[str, Any]]:
    """Optimizers and schedulers inside another, to be followed last: under its own name what has one."""
    kinds = (torch.optim.Optimizer, LRScheduler)
    return [
        (f"{path}.{name}", one)
        for name, one in vars(owner).items()
        if isinstance(one, kinds) or (isinstance(one, (list, tuple)) and any(isinstance(part, kinds) for part in one))
    ][::-1]


def is_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer, or what a library wraps around one."""
    return isinstance(value, torch.optim.Optimizer)


def is_scaler(value: Any) -> bool:
    """Whether a value scales losses as `torch.amp.GradScaler` does."""
    return isinstance(value, torch.amp.GradScaler)


def _inside(path: str, value: Any, holders: list[Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.FunctionType) and not is_compiled(value):
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=True):
            holders.append(cell)
            with suppress(ValueError):  # a name that was never bound
                yield name, cell.cell_contents
        if read := closures.globals_read(value):
            holders.append(Globals(value.__globals__, read))
            yield from read.items()
        if is_users(value.__code__.co_filename):
            holders.append(vars(value))
        for one in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()):
            yield path, one
        return
    if isinstance(value, types.MethodType):
        yield path, value.__self__
    elif isinstance(value, dict):
        yield from ((f"{path}.{key}" if path else str(key), one) for key, one in list(value.items())[: closures.WALKED])
    elif isinstance(value, (list, tuple, set, deque)):
        many = len(value) > 1
        yield from ((f"{path}.{i}" if many else path, one) for i, one in enumerate(islice(value, closures.WALKED)))
    elif isinstance(value, (functools.partial, types.FunctionType)):
        yield from ((path, one) for one in closures.parts(value))
    else:
        named = {
            **getattr(value, "__dict__", {}),
            **{slot.__name__: one for slot, one in closures.in_slots(value).items()},
        }
        yield from ((f"{path}.{key}", one) for key, one in list(named.items())[: closures.WALKED])


def _leave_out_what_modules_own(found: Reached) -> None:
    """A module that is part of another, and a tensor that is a weight of one, stand under that one alone."""
    inner = {id(part) for module in found.modules.values() for part in list(module.modules())[1:]}
    found.modules = {path: module for path, module in found.modules.items() if id(module) not in inner}
    owned = {id(t) for module in found.modules.values() for t in (*module.parameters(), *module.buffers())}
    found.tensors = {path: tensor for path, tensor in found.tensors.items() if id(tensor) not in owned}


class Snapshot:
    """A copy of everything that was reached, taken at once; `restore` puts it back, as often as asked.

    Identity is kept: parameters, state tensors and containers are the same objects afterwards. Random generators
    (PyTorch's, numpy's, Python's, and those that the step reaches) are put back as well, and so are arrays of numpy's
    up to 64 MiB, hooks of modules and tensors, and PyTorch's switches of precision and autocast. What cannot be copied
    (an iterator, a file) goes on as it is. Raises `UsageError` for parameters of lazy modules that have no shape yet.
    """

    def __init__(self, reached: Reached) -> None:
        self._undo: list[Callable[[], None]] = [random_back(), switches_back()]
        tensors: dict[int, torch.Tensor] = {}
        for part in (reached, reached.within):
            if part is not None:
                self._take(part, tensors)
        if any(is_lazy(tensor) for tensor in tensors.values()):
            raise UsageError("a lazy module has parameters without a shape yet: run the model once, then hand it over")
        for tensor in tensors.values():
            self._undo += [tensor_hooks_back(tensor), tensor_back(tensor)]

    def _take(self, reached: Reached, tensors: dict[int, torch.Tensor]) -> None:
        """Copy all but the tensors, which are added to `tensors` by their numbers."""
        tensors.update((id(tensor), tensor) for tensor in reached.tensors.values())
        for module in reached.modules.values():
            for part in module.modules():
                self._undo += [module_back(part), module_hooks_back(part)]
                for tensor in (*part._parameters.values(), *part._buffers.values(), *tensors_in(attributes(part))):
                    if tensor is not None:
                        tensors[id(tensor)] = tensor
        for optimizer in reached.optimizers.values():
            for group in optimizer.param_groups:
                tensors.update((id(one), one) for one in group["params"])
        owners = (*reached.optimizers.values(), *reached.scalers.values(), *reached.schedulers.values())
        for thing in (*owners, *reached.holders):
            back = thing_back(thing, deep=any(thing is owner for owner in owners))
            if back is not None:
                self._undo.append(back)
        for thing in owners:
            for tensor in tensors_in(vars(thing)):
                tensors[id(tensor)] = tensor

    def restore(self) -> None:
        """Put everything back. What fails does not keep the rest from being put back; an error is raised in the end."""
        with ExitStack() as stack:
            for undo in reversed(self._undo):
                stack.callback(undo)


@contextmanager
def preserved(reached: Reached) -> Iterator[Snapshot]:
    """Everything that was reached is afterwards as it was, also after an exception."""
    snapshot = Snapshot(reached)
    try:
        yield snapshot
    finally:
        snapshot.restore()


def same_state(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    """Whether two series of tensors hold the same bits."""
    pairs = list(zip(one, other, strict=True))
    return all(a.dtype == b.dtype and a.shape == b.shape and same_bits(a, b) for a, b in pairs)
