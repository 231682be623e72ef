"""Files that a repository commits and compares with: inside `updating` they are rewritten instead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_written: ContextVar[list[tuple[str, str]] | None] = ContextVar("ampcheck_written", default=None)


@contextmanager
def updating() -> Iterator[list[tuple[str, str]]]:
    """Inside, locks and goldens are rewritten instead of compared; yields each file and entry that was written."""
    written: list[tuple[str, str]] = []
    token = _written.set(written)
    try:
        yield written
    finally:
        _written.reset(token)


def is_updating() -> bool:
    """Return whether `pytest --ampcheck-update` runs."""
    return _written.get() is not None


def note_written(path: str | os.PathLike[str], entry: str) -> None:
    """Report that an entry of a file was written."""
    written = _written.get()
    if written is not None:
        written.append((os.fspath(path), entry))
