"""Callbacks of an audit while it runs: its stages, and their findings as soon as they are judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from ampcheck.core.run import Run

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with the name of the current stage, the number of finished stages, and the number of all stages."""


def silent(*_: object) -> None:
    """No-op callback."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks of an audit. progress: a stage begins. judged: the findings of a stage. compiling: the first stage that
    compiles is next; every eager verdict of a model is judged. training: at most so many training steps are observed
    next."""

    progress: Progress = silent
    judged: Callable[[Run], None] = silent
    compiling: Callable[[], None] = silent
    training: Callable[[int], None] = silent


SILENT = Listener()
"""Callbacks that do nothing."""

_listener: ContextVar[Listener] = ContextVar("ampcheck_listener", default=SILENT)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call these callbacks in the audits that run inside."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def current_listener() -> Listener:
    """The callbacks of an audit that runs here; no-ops outside of `listening`."""
    return _listener.get()
