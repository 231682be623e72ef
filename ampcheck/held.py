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

from ampcheck.compiler import is_compiled, uncompiled
from ampcheck.places import is_users

_WALKED = 1000
"""A longer list or dict holds data, not the parts of a model."""


def walk(part: Any) -> Iterator[Any]:
    """Each module and each function that a callable holds, itself among them, once and in a fixed order.

    Followed are what `torch.compile` was given, bound methods, partials, closures, defaults, the globals that code of
    the user's reads, lists, tuples and dicts, and the attributes of objects of the user's classes. What a module holds
    is its own matter.
    """
    yield from _walk(part, {})


def _walk(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    if id(value) in seen or not _may_hold(value):
        return
    seen[id(value)] = value  # held, so that no other value gets its number meanwhile
    if isinstance(value, (torch.nn.Module, types.FunctionType)):
        yield value
    if not isinstance(value, torch.nn.Module):
        for part in _parts(value):
            yield from _walk(part, seen)


def _may_hold(value: Any) -> bool:
    holds = (torch.nn.Module, types.FunctionType, types.MethodType, functools.partial)
    if isinstance(value, holds) or type(value) in (list, tuple, dict):
        return True
    return not isinstance(value, type) and hasattr(value, "__dict__") and _is_users_object(value)


def _is_users_object(value: Any) -> bool:
    package = type(value).__module__
    home = getattr(sys.modules.get(package), "__file__", None)
    known = package.partition(".")[0] in sys.stdlib_module_names or isinstance(value, torch.Tensor)
    return home is not None and not known and is_users(home)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, types.FunctionType):
        if is_compiled(value):
            return [uncompiled(value)]
        cells = [content for cell in value.__closure__ or () for content in _content(cell)]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*cells, *defaults, *vars(value).values(), *_read(value).values()]  # of a decorated one, `__wrapped__`
    if type(value) in (list, tuple):
        return list(value[:_WALKED])
    return list(value.values() if type(value) is dict else vars(value).values())[:_WALKED]


def _content(cell: Any) -> list[Any]:
    with suppress(ValueError):  # a name that was never bound
        return [cell.cell_contents]
    return []


def _read(function: types.FunctionType) -> dict[str, Any]:
    """The globals that a function of the user's reads, by name."""
    if not is_users(function.__code__.co_filename):
        return {}
    codes = _codes(function.__code__)
    read = {one.argval for code in codes for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    return {name: function.__globals__[name] for name in sorted(read) if name in function.__globals__}


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
    return _Rebinding(change, given, wrap, also).of(part)


class _Rebinding:
    def __init__(
        self,
        change: Callable[[torch.nn.Module], torch.nn.Module],
        given: Callable[[Any], Any],
        wrap: Callable[[Any, Any], Any],
        also: Callable[[Any], bool],
    ) -> None:
        self._change, self._given, self._wrap, self._also = change, given, wrap, also
        self._made: dict[int, tuple[Any, Any]] = {}
        """By the `id` of what it stands for, which is held as well."""

    def of(self, value: Any) -> Any:
        if id(value) in self._made:
            return self._made[id(value)][1]
        if isinstance(value, torch.nn.Module):
            return self._keep(value, self._change(value))
        if not self._changes(value):
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
        vars(twin).update({name: self._argument(one) for name, one in vars(value).items()})
        return twin

    def _changes(self, value: Any) -> bool:
        return any(isinstance(one, torch.nn.Module) or is_compiled(one) or self._also(one) for one in walk(value))

    def _keep(self, value: Any, made: Any) -> Any:
        self._made[id(value)] = value, made
        return made

    def _argument(self, value: Any) -> Any:
        made = self.of(value)
        return self._given(value) if made is value and not isinstance(value, torch.nn.Module) else made

    def _function(self, function: types.FunctionType) -> Any:
        if is_compiled(function):
            return self._keep(function, self._wrap(function, self.of(uncompiled(function))))
        cells = [types.CellType() for _ in function.__closure__ or ()]
        read = {name: one for name, one in _read(function).items() if self._changes(one)}
        names = dict(function.__globals__) if read else function.__globals__
        if read:  # by its name Dynamo would find the module itself, with the globals that are replaced here
            names.pop("__name__", None)
        twin = types.FunctionType(function.__code__, names, function.__name__, None, tuple(cells))
        wrapped = self._keep(function, self._wrap(function, twin))  # before what it holds, which may call it
        twin.__defaults__ = None if function.__defaults__ is None else tuple(map(self.of, function.__defaults__))
        if function.__kwdefaults__ is not None:
            twin.__kwdefaults__ = {name: self.of(one) for name, one in function.__kwdefaults__.items()}
        twin.__qualname__, twin.__module__ = function.__qualname__, function.__module__
        vars(twin).update({name: self.of(one) for name, one in vars(function).items()})
        for cell, own in zip(cells, function.__closure__ or (), strict=True):
            for content in _content(own):
                cell.cell_contents = self.of(content)
        names.update({name: self.of(one) for name, one in read.items()})
        return wrapped
