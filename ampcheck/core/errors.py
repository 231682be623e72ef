"""The error that a user of ampcheck can cause, and what the user's own code raises or returns instead of running."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")

_MESSAGE = 500  # characters of an exception's message that findings quote
_READ = 100_000  # characters of it that are looked through
_ESCAPE = re.compile("\x1b\\[[0-9;?]*[ -/]*[@-~]")
_SCRIPT = "The following operation failed in the TorchScript interpreter."

_FOR_THE_RUNNER = frozenset(
    {
        ("builtins", "KeyboardInterrupt"),
        ("_pytest.outcomes", "OutcomeException"),
        ("_pytest.outcomes", "Exit"),
        ("unittest.case", "SkipTest"),
        ("hypothesis.errors", "StopTest"),
        ("hypothesis.errors", "UnsatisfiedAssumption"),
    }
)
"""Exceptions by which code speaks to whoever runs the tests, by module and name, so that none of them is imported."""


class UsageError(ValueError):
    """What was asked for cannot be done: bad input, a missing device, an unknown name.

    Its message is one sentence that says what was required, what was found and how to mend it. The command line prints
    it and exits with 2; under pytest it is an ordinary exception.
    """


class SubjectError(UsageError):
    """The subject is not as required, which shows only when it runs: its step is a coroutine, its loss a vector."""


def as_result(error: BaseException) -> BaseException:
    """Return what the user's code raised, as a result of its run; raise it again if it is not meant for ampcheck.

    Every `except BaseException` around the user's code goes through here. `SystemExit`, `GeneratorExit` and other
    exceptions that `except Exception` misses are results: a model that calls `sys.exit(0)` must not end the run with
    exit code 0. Raised again: KeyboardInterrupt, the outcomes of pytest and unittest (skip, fail, exit), `assume` of
    Hypothesis, and `SubjectError`.
    """
    if isinstance(error, SubjectError) or is_for_the_runner(error):
        raise error
    return error


def is_for_the_runner(error: BaseException) -> bool:
    """Whether an exception speaks to whoever runs the tests: Ctrl-C, `pytest.skip`, `hypothesis.assume`."""
    return any((kind.__module__, kind.__qualname__) in _FOR_THE_RUNNER for kind in type(error).__mro__)


def require_ran(result: _T, what: str) -> _T:
    """Return `result` of calling the user's code, unless nothing has run yet.

    what: names the callable. Raises `SubjectError` for a coroutine, another awaitable, a generator or an async
    generator.
    """
    for made, is_made, mend in _NOT_RUN:
        if is_made(result):
            text = f"{what} must run when it is called; it returned {made}, of which nothing has run: {mend}"
            if inspect.iscoroutine(result):
                result.close()  # else Python warns that it was never awaited
            raise SubjectError(text)
    return result


_MANAGERS = (contextlib._GeneratorContextManager, contextlib._AsyncGeneratorContextManager)
_NOT_RUN: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("a coroutine", inspect.iscoroutine, "wrap it, such as in lambda: asyncio.run(...)"),
    ("an async generator", inspect.isasyncgen, "make it a function without yield"),
    ("a generator", inspect.isgenerator, "return a list or a tuple, or make it a function without yield"),
    ("an awaitable", inspect.isawaitable, "wait for it, such as with asyncio.run(...)"),
    ("a lazy iterator", lambda made: isinstance(made, (map, filter)), "return a list or a tuple"),
    ("a context manager", lambda made: isinstance(made, _MANAGERS), "enter it with a with statement"),
)


def brief(error: BaseException) -> str:
    """An exception in one line: its type and the first line of its message that says something.

    Of an error in the TorchScript interpreter this is the last line. Control characters are left out, a long line is
    cut, and a message that cannot be read is named by what its `__str__` raises.
    """
    lines = [line for line in map(_printable, message_of(error).splitlines()) if any(map(str.isalnum, line))]
    if not lines:
        return type(error).__name__
    line = lines[-1] if lines[0] == _SCRIPT else lines[0]
    if line.endswith(":") and len(lines) > 1:  # "Error(s) in loading state_dict for Linear:"
        line = f"{line} {lines[1]}"
    return f"{type(error).__name__}: {line if len(line) <= _MESSAGE else line[:_MESSAGE] + '...'}"


def message_of(error: BaseException) -> str:
    """`str(error)` of the user's exception, whose `__str__` may raise; the first 100,000 characters."""
    try:
        return str(error)[:_READ]
    except BaseException as refused:  # noqa: BLE001  # a user's own __str__ may raise anything
        return f"its message cannot be read: __str__ raises {type(as_result(refused)).__name__}"


def _printable(line: str) -> str:
    visible = _ESCAPE.sub("", line)
    return "".join(char if char.isprintable() else " " for char in visible).strip()


def require_schema(data: Any, name: str, kind: str, newest: int) -> None:
    """Raise `UsageError` unless `data`, read from `name`, is an object with a schema number that we can read."""
    if not isinstance(data, Mapping) or type(data.get("schema")) is not int or data["schema"] < 1:
        raise UsageError(f"{name} is no {kind}: a JSON object with an integer 'schema' was expected")
    if data["schema"] > newest:
        raise UsageError(
            f"{name} has schema {data['schema']}, newer than this ampcheck reads ({newest}): update ampcheck"
        )
