"""The one error a user of ampcheck can cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class UsageError(ValueError):
    """What was asked for cannot be done: bad input, a missing device, an unknown name.

    Its message is one sentence that says what was required, what was found and how to mend it. The command line prints
    it and exits with 2; under pytest it is an ordinary exception.
    """


def brief(error: BaseException) -> str:
    """An exception in one line: its type and the first line of what it says."""
    lines = str(error).strip().splitlines()
    if len(lines) > 1 and "TorchScript interpreter" in lines[0]:
        lines = lines[-1:]  # a traceback stands between
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def require_schema(data: Any, name: str, kind: str, newest: int) -> None:
    """Raise `UsageError` unless `data`, read from `name`, is an object with a schema number that we can read."""
    if not isinstance(data, Mapping) or type(data.get("schema")) is not int or data["schema"] < 1:
        raise UsageError(f"{name} is no {kind}: a JSON object with an integer 'schema' was expected")
    if data["schema"] > newest:
        raise UsageError(
            f"{name} has schema {data['schema']}, newer than this ampcheck reads ({newest}): update ampcheck"
        )
