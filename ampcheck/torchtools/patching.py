"""Wrappers in the place of functions, through which several listeners hear of the calls."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Tap:
    """One wrapper in the place of `owner.name`, through which all who listen hear of its calls."""

    def __init__(self, original: Any) -> None:
        self.original = self.call = original
        self.listeners: list[Callable[[Any], Any]] = []

        @functools.wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            return self.call(*args, **kwargs)

        self.ours = ours

    def compose(self) -> None:
        call = self.original
        for make in self.listeners:
            call = make(call)
        self.call = call


_taps: dict[tuple[Any, str], _Tap] = {}
_tapping = threading.Lock()


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`make(original)` in the place of `owner.name`. Blocks may end in any order: the last one puts the original back.

    Left alone where another took its place meanwhile; what then still calls ours reaches the original.
    """
    with _tapping:
        tap = _taps.get((owner, name))
        if tap is None or getattr(owner, name) is not tap.ours:
            tap = _taps[owner, name] = _Tap(getattr(owner, name))
            setattr(owner, name, tap.ours)
        tap.listeners.append(make)
        tap.compose()
    try:
        yield
    finally:
        with _tapping:
            tap.listeners.remove(make)
            tap.compose()
            if not tap.listeners:
                if getattr(owner, name) is tap.ours:
                    setattr(owner, name, tap.original)
                if _taps.get((owner, name)) is tap:
                    del _taps[owner, name]
