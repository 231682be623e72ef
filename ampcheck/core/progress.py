"""The progress callback of long runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with the name of the current stage, the number of finished stages, and the number of all stages."""


def silent(stage: str, done: int, total: int) -> None:
    """No-op callback."""


_shown: ContextVar[Progress] = ContextVar("ampcheck_progress", default=silent)


@contextmanager
def showing(progress: Progress) -> Iterator[None]:
    """Show with this callback the stages of the audits that run inside."""
    token = _shown.set(progress)
    try:
        yield
    finally:
        _shown.reset(token)


def shown_progress() -> Progress:
    """The callback that shows progress here; a no-op outside of `showing`."""
    return _shown.get()
