"""What a callable holds: the modules that run when it is called, and the same callable with others in their place."""

from __future__ import annotations

import copy
import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from ampcheck.torchtools.dynamo import is_compiled, uncompiled
from ampcheck.torchtools.source import is_users

WALKED = 1000
"""A longer list or dict holds data, not the parts of a model."""

CALLABLES = (types.FunctionType, types.MethodType, functools.partial)
"""What is followed as a callable."""


def walk(part: Any) -> Iterator[Any]:
    """Each module and each function that a callable holds, itself among them, once and in a fixed order.

    Followed are what `torch.compile` was given, bound methods, partials, closures, defaults, the globals that code of
    the user's reads, lists, tuples and dicts, and the attributes of objects of the user's classes. What a module holds
    is its own matter.
    """
    seen: dict[int, Any] = {}
    waiting = [part]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or not may_hold(value):
            continue
        seen[id(value)] = value  # held, so that no other value gets its number meanwhile
        if isinstance(value, (torch.nn.Module, types.FunctionType)):
            yield value
        if not isinstance(value, torch.nn.Module):
            waiting += reversed(parts(value))


def may_hold(value: Any) -> bool:
    """Whether a value is followed: a module, a callable, a plain container, an object of the user's classes."""
    if isinstance(value, (torch.nn.Module, *CALLABLES)) or type(value) in (list, tuple, dict):
        return True
    if isinstance(value, (type, torch.Tensor)) or not is_users_class(type(value)):
        return False
    return hasattr(value, "__dict__") or bool(_slots(type(value)))


def is_users_class(kind: type) -> bool:
    """Whether a class is neither Python's nor PyTorch's nor ours."""
    package = kind.__module__
    home = getattr(sys.modules.get(package), "__file__", None)
    return home is not None and package.partition(".")[0] not in sys.stdlib_module_names and is_users(home)


def in_slots(value: Any) -> dict[types.MemberDescriptorType, Any]:
    """What the slots of an object hold; empty ones are left out."""
    found: dict[types.MemberDescriptorType, Any] = {}
    for slot in _slots(type(value)):
        with suppress(AttributeError):
            found[slot] = slot.__get__(value)
    return found


def _slots(kind: type) -> list[types.MemberDescriptorType]:
    """The slots that the class statements of a class and of those above it name."""
    named = (vars(above) for above in kind.__mro__ if "__slots__" in vars(above))
    return [one for names in named for one in names.values() if isinstance(one, types.MemberDescriptorType)]


def parts(value: Any) -> list[Any]:
    """What a value that `may_hold` something holds."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, types.FunctionType):
        if is_compiled(value):
            return [uncompiled(value)]
        cells = [content for cell in value.__closure__ or () for content in _content(cell)]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [
            *cells,
            *defaults,
            *vars(value).values(),
            *globals_read(value).values(),
        ]  # of a decorated one, `__wrapped__`
    if type(value) in (list, tuple):
        return list(value[:WALKED])
    if type(value) is dict:
        return list(value.values())[:WALKED]
    return [*getattr(value, "__dict__", {}).values(), *in_slots(value).values()][:WALKED]


def _content(cell: Any) -> list[Any]:
    with suppress(ValueError):  # a name that was never bound
        return [cell.cell_contents]
    return []


def globals_read(function: types.FunctionType) -> dict[str, Any]:
    """The globals that a function of the user's reads, by name."""
    if not is_users(function.__code__.co_filename):
        return {}
    names = _global_names(function.__code__)
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    read = (one.argval for part in _codes(code) for one in dis.get_instructions(part) if one.opname == "LOAD_GLOBAL")
    return tuple(sorted(set(read)))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def rebound(
    part: Any,
    change: Callable[[torch.nn.Module], torch.nn.Module],
    *,
    given: Callable[[Any], Any] = lambda value: value,
    wrap: Callable[[Any, Any], Any] = lambda function, twin: twin,
    also: Callable[[Any], bool] = lambda function: False,
) -> Any:
    """The callable with what `change` makes of each module that it holds.

    given: what becomes of other arguments of a partial and other attributes of an object on the way to a module. wrap:
    what becomes of a twin, by the function that it stands for. also: which functions get a twin although they hold no
    module; compiled ones do. All else stays as it is.
    """
    changing = _on_the_way(part, lambda one: isinstance(one, torch.nn.Module) or is_compiled(one) or also(one))
    rebinding = _Rebinding(change, given, wrap, changing)
    made = rebinding.of(part)
    rebinding.fill()
    return made


def _on_the_way(part: Any, wanted: Callable[[Any], bool]) -> dict[int, Any]:
    """What is wanted among all that a callable holds, and whatever holds such a thing, by `id`."""
    held: dict[int, Any] = {}
    holders: dict[int, list[int]] = {}
    waiting = [part]
    while waiting:
        value = waiting.pop()
        if id(value) in held or not may_hold(value):
            continue
        held[id(value)] = value
        inside = [] if isinstance(value, torch.nn.Module) else parts(value)
        for one in inside:
            holders.setdefault(id(one), []).append(id(value))
        waiting += inside
    found: dict[int, Any] = {}
    left = [number for number, value in held.items() if wanted(value)]
    while left:
        number = left.pop()
        if number not in found:
            found[number] = held[number]
            left += holders.get(number, ())
    return found


class _Rebinding:
    def __init__(
        self,
        change: Callable[[torch.nn.Module], torch.nn.Module],
        given: Callable[[Any], Any],
        wrap: Callable[[Any, Any], Any],
        changing: dict[int, Any],
    ) -> None:
        self._change, self._given, self._wrap, self._changing = change, given, wrap, changing
        self._made: dict[int, tuple[Any, Any]] = {}
        """By the `id` of what it stands for, which is held as well."""
        self._empty: list[tuple[types.FunctionType, types.FunctionType, dict[str, Any]]] = []
        """Twins without what their functions hold: these may hold each other."""

    def of(self, value: Any) -> Any:
        if id(value) in self._made:
            return self._made[id(value)][1]
        if isinstance(value, torch.nn.Module):
            return self._keep(value, self._change(value))
        if id(value) not in self._changing:
            return value
        if isinstance(value, functools.partial):
            args = [self._argument(one) for one in value.args]
            named = {name: self._argument(one) for name, one in value.keywords.items()}
            return self._keep(value, functools.partial(self.of(value.func), *args, **named))
        if isinstance(value, types.MethodType):
            owner = self.of(value.__self__)
            name = getattr(value.__func__, "__name__", "")
            same = getattr(type(owner), name, None) is value.__func__
            return self._keep(value, types.MethodType(value.__func__, owner) if same else getattr(owner, name))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if type(value) is dict:
            return self._keep(value, {name: self.of(one) for name, one in value.items()})
        if type(value) in (list, tuple):
            return self._keep(value, type(value)(map(self.of, value)))
        twin = self._keep(value, copy.copy(value))
        if hasattr(value, "__dict__"):
            vars(twin).update({name: self._argument(one) for name, one in vars(value).items()})
        for slot, one in in_slots(value).items():  # also of an object that is frozen
            slot.__set__(twin, self._argument(one))
        return twin

    def _keep(self, value: Any, made: Any) -> Any:
        self._made[id(value)] = value, made
        return made

    def _argument(self, value: Any) -> Any:
        made = self.of(value)
        return self._given(value) if made is value and not isinstance(value, torch.nn.Module) else made

    def _function(self, function: types.FunctionType) -> Any:
        if is_compiled(function):
            return self._keep(function, self._wrap(function, self.of(uncompiled(function))))
        read = {name: one for name, one in globals_read(function).items() if id(one) in self._changing}
        names = dict(function.__globals__) if read else function.__globals__
        if read:  # by its name Dynamo would find the module itself, with the globals that are replaced here
            names.pop("__name__", None)
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        twin = types.FunctionType(function.__code__, names, function.__name__, None, cells)
        self._empty.append((function, twin, read))
        return self._keep(function, self._wrap(function, twin))

    def fill(self) -> None:
        """Give each twin what its function holds."""
        while self._empty:
            function, twin, read = self._empty.pop()
            twin.__defaults__ = None if function.__defaults__ is None else tuple(map(self.of, function.__defaults__))
            if function.__kwdefaults__ is not None:
                twin.__kwdefaults__ = {name: self.of(one) for name, one in function.__kwdefaults__.items()}
            twin.__qualname__, twin.__module__ = function.__qualname__, function.__module__
            vars(twin).update({name: self.of(one) for name, one in vars(function).items()})
            for cell, own in zip(twin.__closure__ or (), function.__closure__ or (), strict=True):
                for content in _content(own):
                    cell.cell_contents = self.of(content)
            twin.__globals__.update({name: self.of(one) for name, one in read.items()})
