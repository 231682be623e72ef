"""Wrappers in the place of functions, which several listeners may share; also of modules not imported as yet."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType
from typing import Any, TypeAlias

import torch

from ampcheck.torchtools.private import without_modes, without_torch_function

Observer: TypeAlias = Callable[..., Iterator[None] | None]
"""Gets the arguments of a call before it. A generator function goes on after it, with the result: `result = yield`."""

_INHERITED = object()


class _Patch:
    """One wrapper in the place of `owner.name`, for all who listen to its calls."""

    def __init__(self, owner: object, name: str, equal: bool) -> None:
        self._owner, self._name = owner, name
        self._stored = vars(owner).get(name, _INHERITED)  # such as a staticmethod, which an access unpacks
        self.original = self.call = original = getattr(owner, name)
        self.listeners: list[Callable[[Any], Any]] = []

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return self.call(*args, **kwargs)

        self.wrapper = _Equal(wrapper, original) if equal else wrapper

    def install(self) -> None:
        is_bound = isinstance(self._stored, (staticmethod, classmethod))
        setattr(self._owner, self._name, staticmethod(self.wrapper) if is_bound else self.wrapper)

    def remove(self) -> None:
        if getattr(self._owner, self._name) is not self.wrapper:
            return
        if self._stored is _INHERITED:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._stored)

    def compose(self) -> None:
        call = self.original
        for make in self.listeners:
            call = make(call)
        self.call = call


class _Equal:
    """A wrapper that equals its original: a table of functions has both, though it was made while one was replaced."""

    def __init__(self, wrapper: Callable[..., Any], original: Any) -> None:
        functools.update_wrapper(self, wrapper)
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __eq__(self, other: object) -> bool:
        return other is self or bool(other == self._original)

    def __hash__(self) -> int:
        return hash(self._original)


_patches: dict[tuple[Any, str], _Patch] = {}
_lock = threading.Lock()


@contextmanager
def replaced(owner: object, name: str, make: Callable[[Any], Any], *, equal: bool = False) -> Iterator[None]:
    """`make(original)` in the place of `owner.name`. Blocks may end in any order: the last one restores the original.

    Left alone where another function took its place meanwhile; the wrapper then still calls the original. equal: the
    wrapper equals the original, for functions that PyTorch keeps in tables, such as those that make tensors.
    """
    with _lock:
        patch = _patches.get((owner, name))
        if patch is None or getattr(owner, name) is not patch.wrapper:
            patch = _patches[owner, name] = _Patch(owner, name, equal)
            patch.install()
        patch.listeners.append(make)
        patch.compose()
    try:
        yield
    finally:
        with _lock:
            patch.listeners.remove(make)
            patch.compose()
            if not patch.listeners:
                patch.remove()
                if _patches.get((owner, name)) is patch:
                    del _patches[owner, name]


class ObservedCall(list[Any]):
    """Observers of one call: run before it, with generators that go on after it."""

    def begin(self, observers: Iterable[Observer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run what stands before each `yield`."""
        for observer in observers:
            after: Any = observer(*args, **kwargs)
            with suppress(StopIteration):
                if after is not None:
                    next(after)
                    self.append(after)

    def end(self, result: object = None) -> None:
        """Run what stands after each `yield`."""
        for after in self:
            with suppress(StopIteration):
                after.send(result)

    def close(self) -> None:
        """Close the generators that have not ended."""
        for after in self:
            after.close()


def observing(observers: Callable[[], Iterable[Observer]], original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, with the observers that there are when it is called."""

    def run(*args: Any, **kwargs: Any) -> Any:
        call = ObservedCall()
        try:
            call.begin(observers(), args, kwargs)
            result = original(*args, **kwargs)
            call.end(result)
        finally:
            call.close()
        return result

    return run


def observed(owner: object, name: str, *observers: Observer) -> AbstractContextManager[None]:
    """Call observers around each call of `owner.name`."""
    return replaced(owner, name, functools.partial(observing, lambda: observers))


@contextmanager
def originals(functions: Iterable[tuple[object, str]]) -> Iterator[None]:
    """Inside, the functions `owner.name` are not replaced."""
    with _lock:
        patches = [patch for function in functions if (patch := _patches.get(function)) is not None]
        for patch in patches:
            patch.remove()
    try:
        yield
    finally:
        with _lock:
            for patch in patches:
                if patch.listeners:
                    patch.install()


def around_exports(enter: Callable[[], AbstractContextManager[object]]) -> AbstractContextManager[None]:
    """Strict exports run inside `enter()`, which takes away what Dynamo would capture: hooks, functions replaced."""

    def export(*_: object, **__: object) -> Iterator[None]:
        with enter():
            yield

    return once_imported("torch.export._trace", lambda module: observed(module, "_export_to_torch_ir", export))


@contextmanager
def traces_unseen(ended: Callable[[object], None]) -> Iterator[None]:
    """`torch.jit.trace` runs outside of any mode: its tracer refuses ops that Python code runs in between.

    ended: is called with the function or module that was traced, whose buffers that may have changed.
    """

    def trace(traced: object = None, *_: object, **__: object) -> Iterator[None]:
        with without_modes(), without_torch_function():
            yield
        ended(traced)

    with observed(torch.jit, "trace", trace), observed(torch.jit, "trace_module", trace):
        yield


@contextmanager
def once_imported(name: str, enter: Callable[[ModuleType], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter `enter(module)` inside the block: now where the module is imported, else when something imports it.

    The code of the module then runs outside of any dispatch mode, as if it had been imported before.
    """
    with ExitStack() as stack:
        if name in sys.modules:
            stack.enter_context(enter(sys.modules[name]))
        else:
            finder = _Finder(name, lambda module: stack.enter_context(enter(module)))
            sys.meta_path.insert(0, finder)
            stack.callback(sys.meta_path.remove, finder)
        yield


class _Finder:
    """Finds one module by the other finders of `sys.meta_path`, and calls `imported` with it."""

    def __init__(self, name: str, imported: Callable[[ModuleType], object]) -> None:
        self._name, self._imported, self._asks = name, imported, False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the module, whose loader calls; None for others."""
        if name != self._name or self._asks:
            return None
        self._asks = True  # another block may wait for the same module
        try:
            specs = (finder.find_spec(name, path, target) for finder in tuple(sys.meta_path))
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self._asks = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with without_modes():
                    load(module)
                self._imported(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def attribute(owner: Any, name: str, value: object) -> Iterator[None]:
    """Set `owner.name` inside."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def without_warning(message: str) -> Iterator[None]:
    """Ignore the warnings inside that begin with `message`. Other filters stay, those that are added inside as well."""
    warnings.filterwarnings("ignore", message)
    ignored = warnings.filters[0]
    try:
        yield
    finally:
        if ignored in warnings.filters:
            warnings.filters.remove(ignored)  # type: ignore[attr-defined]
