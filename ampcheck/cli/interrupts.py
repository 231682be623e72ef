"""SIGTERM, as `timeout` and a cancelled CI job send it, ends a command as Ctrl-C does."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

from ampcheck.core.exit import sigterm_raises

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and after SIGTERM."""


class Terminated(KeyboardInterrupt):
    """SIGTERM. A `KeyboardInterrupt`, so that what was judged is reported and no exception of the user's is assumed."""


def ending_of(error: KeyboardInterrupt) -> tuple[str, int]:
    """Return what stopped a command, in words, and its exit code. error: what it raised, or was raised from."""
    if isinstance(error, Terminated) or isinstance(error.__cause__, Terminated):
        return "stopped by SIGTERM", TERMINATED
    return "interrupted", INTERRUPTED


def sigterm_interrupts() -> AbstractContextManager[None]:
    """SIGTERM raises `Terminated` once, but for ranks of torchrun: where one fails, the others get SIGTERM in a
    collective that does not return to Python."""
    return nullcontext() if "RANK" in os.environ else sigterm_raises(Terminated(), once=True)
