"""Tracebacks of failed tests: the user's frames without ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TypeAlias

import pytest

Failure: TypeAlias = "pytest.ExceptionInfo[BaseException]"


def hide_own_frames(item: pytest.Item, excinfo: Failure) -> Failure:
    """The exception of a test, and what caused it, without our frames; unchanged where we have no part in it.

    What we raise on purpose, and the errors of the user's code that it names, also lose the frames of PyTorch, pytest
    and the standard library; without any frame left it is shown at the first line of the test. A defect of ours keeps
    its frames.
    """
    from ampcheck.core.errors import UsageError  # late: a session without failures imports nothing of ours

    chain = list(_chain(excinfo.value))
    if not any(_has_part(list(_frames(error))) for error in chain):
        return excinfo
    on_purpose = isinstance(excinfo.value, (AssertionError, UsageError))
    for error in chain:
        frames = list(_frames(error))
        others = [frame for frame in frames if not _is_ours(frame)]
        users = [frame for frame in others if not _is_library(frame)]
        raised_by_us = bool(frames) and _is_ours(frames[-1])
        if on_purpose and (users or raised_by_us):
            error.__traceback__ = _joined(users)
        elif not raised_by_us:
            error.__traceback__ = _joined(others)
    if excinfo.value.__traceback__ is None:
        excinfo.value.__traceback__ = _at_test(item, excinfo.value)
    return pytest.ExceptionInfo.from_exception(excinfo.value)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and those that it is raised from, as a traceback shows them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _frames(error: BaseException) -> Iterator[TracebackType]:
    entry = error.__traceback__
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _joined(entries: Sequence[TracebackType]) -> TracebackType | None:
    joined: TracebackType | None = None
    for entry in reversed(entries):
        joined = TracebackType(joined, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return joined


def _is_ours(entry: TracebackType) -> bool:
    return _package(entry) == "ampcheck"


def _has_part(frames: Sequence[TracebackType]) -> bool:
    """Return whether an error is ours or passed through us; every error of a test passes through the hooks of the
    plugin."""
    ours = [frame for frame in frames if _is_ours(frame)]
    return bool(ours) and (_is_ours(frames[-1]) or any(".plugin." not in _module(frame) for frame in ours))


def _is_library(entry: TracebackType) -> bool:
    return _package(entry) in ("torch", "_pytest", "pluggy", "contextlib", "functools", "unittest")


def _package(entry: TracebackType) -> str:
    """The package whose module a frame runs, also code without a file, such as the `__init__` of a dataclass."""
    return _module(entry).partition(".")[0]


def _module(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__", ""))


def _at_test(item: pytest.Item, error: BaseException) -> TracebackType | None:
    """A traceback whose one frame is the first line of the test."""
    path, line, _ = item.reportinfo()
    code = compile("raise error", str(path), "exec").replace(co_firstlineno=(line or 0) + 1)
    try:
        exec(code, {"error": error.with_traceback(None)})
    except BaseException as raised:  # noqa: BLE001  # it is the one that was passed
        return raised.__traceback__.tb_next if raised.__traceback__ is not None else None
    return None
