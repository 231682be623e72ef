"""Wrappers in the place of functions, which several listeners may share."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Patch:
    """One wrapper in the place of `owner.name`, for all who listen to its calls."""

    def __init__(self, original: Any) -> None:
        self.original = self.call = original
        self.listeners: list[Callable[[Any], Any]] = []

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return self.call(*args, **kwargs)

        self.wrapper = wrapper

    def compose(self) -> None:
        self.call = functools.reduce(lambda call, make: make(call), self.listeners, self.original)


_patches: dict[tuple[Any, str], _Patch] = {}
_lock = threading.Lock()


@contextmanager
def replaced(owner: object, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`make(original)` in the place of `owner.name`. Blocks may end in any order: the last one restores the original.

    Left alone where another function took its place meanwhile; the wrapper then still calls the original.
    """
    with _lock:
        patch = _patches.get((owner, name))
        if patch is None or getattr(owner, name) is not patch.wrapper:
            patch = _patches[owner, name] = _Patch(getattr(owner, name))
            setattr(owner, name, patch.wrapper)
        patch.listeners.append(make)
        patch.compose()
    try:
        yield
    finally:
        with _lock:
            patch.listeners.remove(make)
            patch.compose()
            if not patch.listeners:
                if getattr(owner, name) is patch.wrapper:
                    setattr(owner, name, patch.original)
                if _patches.get((owner, name)) is patch:
                    del _patches[owner, name]
