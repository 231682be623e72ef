"""The objects that a callable contains: its modules and functions, and the same callable with other modules."""

from __future__ import annotations

import copy
import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import torch

from ampcheck.torchtools.dynamo import is_compiled, uncompiled
from ampcheck.torchtools.source import is_users

WALKED = 1000
"""A longer list or dict contains data, not the parts of a model."""

CALLABLES = (types.FunctionType, types.MethodType, functools.partial)

_SEQUENCES = (list, tuple, set, deque)
_PLAIN = (list, tuple, dict)


def walk(root: object) -> Iterator[torch.nn.Module | types.FunctionType]:
    """Each module and each function that a callable contains, itself included, once and in a fixed order.

    Followed are functions under `torch.compile`, bound methods, partials, closures, defaults, the globals that the
    user's code reads, lists, tuples and dicts, and the attributes of objects of the user's classes. A module is not
    followed further.
    """
    for value, _ in _graph(root).values():
        if isinstance(value, (torch.nn.Module, types.FunctionType)):
            yield value


def _graph(root: object) -> dict[int, tuple[object, list[object]]]:
    """Each value that is followed, with its children, by `id`, in the order of a depth-first walk."""
    graph: dict[int, tuple[object, list[object]]] = {}
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in graph or not is_followed(value):
            continue
        if isinstance(value, torch.nn.Module):
            named = []
        elif isinstance(value, (*_SEQUENCES, dict)) and type(value) not in _PLAIN:
            named = _attributes(value, "")  # `rebound` cannot replace the elements
        else:
            named = children(value)
        inside = [child for _, child in named]
        graph[id(value)] = value, inside  # kept alive: its id is not reused
        waiting += reversed(inside)
    return graph


def is_followed(value: object) -> bool:
    """Return whether a value is a module, a callable, a plain container, or an object of the user's classes."""
    if isinstance(value, (torch.nn.Module, *CALLABLES)) or type(value) in _PLAIN:
        return True
    if isinstance(value, (type, torch.Tensor)) or not is_users_class(type(value)):
        return False
    return hasattr(value, "__dict__") or bool(_slots(type(value)))


def is_users_class(kind: type) -> bool:
    """Return whether a class belongs neither to Python nor to PyTorch nor to ampcheck."""
    package = kind.__module__
    home = getattr(sys.modules.get(package), "__file__", "notebook" if package == "__main__" else None)
    return home is not None and package.partition(".")[0] not in sys.stdlib_module_names and is_users(home)


def children(value: object, path: str = "", *, read_globals: bool = True) -> list[tuple[str, Any]]:
    """The values directly inside a value, each with its path; `path` is that of the value itself."""
    if isinstance(value, functools.partial):
        return [(path, child) for child in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, types.MethodType):
        return [(path, value.__self__)]
    if isinstance(value, types.FunctionType):
        if is_compiled(value):
            return [(path, uncompiled(value))]
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        own = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values())
        return [
            *((name, content) for name, cell in cells for content in cell_content(cell)),
            *((path, child) for child in own),  # of a decorated function, `__wrapped__`
            *(globals_read(value).items() if read_globals else ()),
        ]
    if isinstance(value, _SEQUENCES):
        several = len(value) > 1
        return [(f"{path}.{i}" if several else path, child) for i, child in enumerate(islice(value, WALKED))]
    if isinstance(value, dict):
        held = islice(dict.items(value), WALKED)  # its own `items` may import or compute what it has: Transformers
        return [(f"{path}.{key}" if path else str(key), child) for key, child in list(held)]
    return _attributes(value, path)


def _attributes(value: object, path: str) -> list[tuple[str, Any]]:
    attributes = {**getattr(value, "__dict__", {}), **{slot.__name__: filled for slot, filled in in_slots(value)}}
    return [(f"{path}.{name}", child) for name, child in islice(attributes.items(), WALKED)]


def cell_content(cell: types.CellType) -> list[Any]:
    """The content of a closure's cell; empty where its name was never bound."""
    with suppress(ValueError):
        return [cell.cell_contents]
    return []


def in_slots(value: object) -> list[tuple[types.MemberDescriptorType, Any]]:
    """The slots of an object and what they contain; empty ones are left out."""
    filled = []
    for slot in _slots(type(value)):
        with suppress(AttributeError):
            filled.append((slot, slot.__get__(value)))
    return filled


def _slots(kind: type) -> list[types.MemberDescriptorType]:
    named = (vars(base) for base in kind.__mro__ if "__slots__" in vars(base))
    return [slot for names in named for slot in names.values() if isinstance(slot, types.MemberDescriptorType)]


def globals_read(function: types.FunctionType) -> dict[str, Any]:
    """The globals that a function of the user's reads, by name."""
    if not is_users(function.__code__.co_filename):
        return {}
    return globals_of(function.__code__, function.__globals__)


def globals_of(code: types.CodeType, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The names of a module's namespace that code in it reads."""
    return {name: namespace[name] for name in _global_names(code) if name in namespace}


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "LOAD_GLOBAL"}
    inner = (_global_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(sorted(names.union(*inner)))


def rebound(
    root: object,
    change: Callable[[torch.nn.Module], torch.nn.Module],
    *,
    copy_argument: Callable[[object], object] = lambda value: value,
    wrap: Callable[[Any, Any], object] = lambda function, twin: twin,
    also: Callable[[object], bool] = lambda function: False,
) -> Any:
    """The callable with `change(module)` in the place of each module that it contains.

    copy_argument: applied to other arguments of a partial and other attributes of an object that contains a module.
    wrap: `wrap(function, twin)` takes the place of a function's twin. also: functions that get a twin although they
    contain no module; compiled functions always do. Everything else is shared.
    """
    graph = _graph(root)
    grown = {
        n for n, (value, _) in graph.items() if isinstance(value, torch.nn.Module) or is_compiled(value) or also(value)
    }
    changing: set[int] = set()
    while grown:
        changing |= grown
        grown = {n for n, (_, inside) in graph.items() if n not in changing and any(id(c) in grown for c in inside)}
    rebinding = _Rebinding(change, copy_argument, wrap, changing)
    twin = rebinding.twin(root)
    rebinding.fill()
    return twin


class _Rebinding:
    """The twins of values whose ids are in `changing`, all of which the caller's graph keeps alive."""

    def __init__(
        self,
        change: Callable[[torch.nn.Module], torch.nn.Module],
        copy_argument: Callable[[object], object],
        wrap: Callable[[Any, Any], object],
        changing: set[int],
    ) -> None:
        self._change, self._copy_argument, self._wrap, self._changing = change, copy_argument, wrap, changing
        self._twins: dict[int, tuple[object, Any]] = {}
        self._empty: list[tuple[types.FunctionType, types.FunctionType, dict[str, object]]] = []
        """Functions and their twins, which are filled last because functions may contain each other."""

    def twin(self, value: object) -> Any:
        if id(value) not in self._twins:
            if id(value) not in self._changing and not isinstance(value, torch.nn.Module):
                return value
            self._twins[id(value)] = value, self._made(value)
        return self._twins[id(value)][1]

    def _made(self, value: Any) -> object:
        if isinstance(value, torch.nn.Module):
            return self._change(value)
        if isinstance(value, functools.partial):
            keywords = {name: self._argument(child) for name, child in value.keywords.items()}
            return functools.partial(self.twin(value.func), *map(self._argument, value.args), **keywords)
        if isinstance(value, types.MethodType):
            owner = self.twin(value.__self__)
            name = getattr(value.__func__, "__name__", "")
            same = getattr(type(owner), name, None) is value.__func__
            return types.MethodType(value.__func__, owner) if same else getattr(owner, name)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if type(value) is dict:
            return {name: self.twin(child) for name, child in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(self.twin, value))
        twin = copy.copy(value)
        self._twins[id(value)] = value, twin  # an object may contain itself
        if hasattr(value, "__dict__"):
            vars(twin).update({name: self._argument(child) for name, child in vars(value).items()})
        for slot, child in in_slots(value):  # also of a frozen object
            slot.__set__(twin, self._argument(child))
        return twin

    def _argument(self, value: object) -> object:
        twin = self.twin(value)
        return self._copy_argument(value) if twin is value and not isinstance(value, torch.nn.Module) else twin

    def _function(self, function: types.FunctionType) -> object:
        if is_compiled(function):
            return self._wrap(function, self.twin(uncompiled(function)))
        read = {name: child for name, child in globals_read(function).items() if id(child) in self._changing}
        names = dict(function.__globals__) if read else function.__globals__
        if read:  # under its name Dynamo would find the original namespace
            names.pop("__name__", None)
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        twin = types.FunctionType(function.__code__, names, function.__name__, None, cells)
        self._empty.append((function, twin, read))
        return self._wrap(function, twin)

    def fill(self) -> None:
        """Give each function's twin the twins of what the function contains."""
        while self._empty:
            function, twin, read = self._empty.pop()
            twin.__defaults__ = None if function.__defaults__ is None else tuple(map(self.twin, function.__defaults__))
            if function.__kwdefaults__ is not None:
                twin.__kwdefaults__ = {name: self.twin(child) for name, child in function.__kwdefaults__.items()}
            twin.__qualname__, twin.__module__ = function.__qualname__, function.__module__
            vars(twin).update({name: self.twin(child) for name, child in vars(function).items()})
            for cell, own in zip(twin.__closure__ or (), function.__closure__ or (), strict=True):
                for content in cell_content(own):
                    cell.cell_contents = self.twin(content)
            twin.__globals__.update({name: self.twin(child) for name, child in read.items()})
