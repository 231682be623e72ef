"""The error that a user of ampcheck can cause, how exceptions of the user's own code are handled, and what ends it."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from ampcheck.core.text import clean

_T = TypeVar("_T")

OP_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
"""Exceptions of an op that does not take such arguments."""

_MESSAGE = 500  # characters of an exception's message that findings quote
_READ = 100_000  # characters of it that are searched for a line to quote
_COLOURS = re.compile("\x1b\\[[0-9;?]*[ -/]*[@-~]")
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
"""Exceptions that control a test runner, by module and name, so that none of them is imported."""

SHOWS = "_ampcheck_shows_findings"
"""The attribute of an exception whose text shows the findings of its run, so that pytest's summary only names them."""


class UsageError(ValueError):
    """A request that cannot be fulfilled: bad input, a missing device, an unknown name.

    The message is one sentence: the requirement, the value found, and what to change. The command line prints it and
    exits with 2; under pytest it is an ordinary exception.
    """


class SubjectError(UsageError):
    """A defect of the subject that shows only when it runs: its step is a coroutine, its loss a vector."""


class EnoughSteps(BaseException):
    """Ends the user's code after the last step that is observed. `except Exception` does not catch it."""


class AsksForCUDA(BaseException):
    """Ends code that asks for CUDA on a machine without it, which is then judged with CUDA emulated on the CPU."""


def as_result(error: BaseException) -> BaseException:
    """Return an exception of the user's code as the result of its run, or raise it again if it controls a test runner.

    Every `except BaseException` around the user's code goes through here. `SystemExit`, `GeneratorExit` and other
    exceptions that `except Exception` misses are results: a model that calls `sys.exit(0)` must not end the run with
    exit code 0. Raised again: KeyboardInterrupt, the outcomes of pytest and unittest (skip, fail, exit), `assume` of
    Hypothesis, `SubjectError`, and `AsksForCUDA`.
    """
    if isinstance(error, (SubjectError, AsksForCUDA)) or is_for_the_runner(error):
        raise error
    return error


def is_for_the_runner(error: BaseException) -> bool:
    """Return whether an exception controls a test runner: Ctrl-C, `pytest.skip`, `hypothesis.assume`."""
    return any((kind.__module__, kind.__qualname__) in _FOR_THE_RUNNER for kind in type(error).__mro__)


def require_ran(result: _T, what: str) -> _T:
    """Return the `result` of a call of the user's code if the call has run that code.

    what: names the callable. Raises `SubjectError` for a coroutine, another awaitable, a generator or an async
    generator.
    """
    for kind, is_kind, advice in _NOT_RUN:
        if is_kind(result):
            text = f"{what} must run when it is called; it returned {kind}, of which nothing has run: {advice}"
            if inspect.iscoroutine(result):
                result.close()  # else Python warns that it was never awaited
            raise SubjectError(text)
    return result


_MANAGERS = (contextlib._GeneratorContextManager, contextlib._AsyncGeneratorContextManager)
_NOT_RUN: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    ("a coroutine", inspect.iscoroutine, "wrap it, such as in lambda: asyncio.run(...)"),
    ("an async generator", inspect.isasyncgen, "make it a function without yield"),
    ("a generator", inspect.isgenerator, "return a list or a tuple, or make it a function without yield"),
    ("an awaitable", inspect.isawaitable, "wait for it, such as with asyncio.run(...)"),
    ("a lazy iterator", lambda result: isinstance(result, (map, filter)), "return a list or a tuple"),
    ("a context manager", lambda result: isinstance(result, _MANAGERS), "enter it with a with statement"),
)


def brief(error: BaseException) -> str:
    """An exception in one line: its type and the first line of its message with a letter or digit in it.

    Of an error in the TorchScript interpreter this is the last line. A long line is cut.
    """
    lines = [" ".join(clean(_COLOURS.sub("", line)).split()) for line in message_of(error).splitlines()]
    lines = [line for line in lines if any(map(str.isalnum, line))]
    if not lines:
        return type(error).__name__
    line = lines[-1] if lines[0] == _SCRIPT else lines[0]
    if line.endswith(":") and len(lines) > 1:  # "Error(s) in loading state_dict for Linear:"
        line = f"{line} {lines[1]}"
    return f"{type(error).__name__}: {line if len(line) <= _MESSAGE else line[:_MESSAGE] + '...'}"


def message_of(error: BaseException) -> str:
    """The first 100,000 characters of `str(error)`, or which exception the user's `__str__` raises."""
    try:
        return str(error)[:_READ]
    except BaseException as refused:  # noqa: BLE001  # a user's own __str__ may raise anything
        return f"its message cannot be read: __str__ raises {type(as_result(refused)).__name__}"


def require_schema(data: object, name: str, kind: str, newest: int) -> None:
    """Raise `UsageError` unless `data`, read from `name`, is an object with a supported schema number."""
    schema = data.get("schema") if isinstance(data, Mapping) else None
    if type(schema) is not int or schema < 1:
        raise UsageError(f"{name} is no {kind}: a JSON object with an integer 'schema' was expected")
    if schema > newest:
        number = str(schema) if len(str(schema)) < 40 else f"{schema!s:.40}..."  # damage has any number
        raise UsageError(f"{name} has schema {number}, newer than this ampcheck reads ({newest}): update ampcheck")
