"""The one error a user of ampcheck can cause."""

from __future__ import annotations


class UsageError(ValueError):
    """What was asked for cannot be done: bad input, a missing device, an unknown name.

    Its message is one sentence that says what was required, what was found and how to mend it. The command line prints
    it and exits with 2; under pytest it is an ordinary exception.
    """


def brief(error: BaseException) -> str:
    """An exception in one line: its type and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
