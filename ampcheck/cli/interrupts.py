"""SIGTERM, as `timeout` and a cancelled CI job send it, ends a command as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and after SIGTERM."""


class Terminated(KeyboardInterrupt):
    """SIGTERM. A `KeyboardInterrupt`, so that what was judged is reported and no exception of the user's is assumed."""


def ending_of(error: KeyboardInterrupt) -> tuple[str, int]:
    """What stopped a command, in words, and its exit code. error: what it raised, or was raised from."""
    if isinstance(error, Terminated) or isinstance(error.__cause__, Terminated):
        return "stopped by SIGTERM", TERMINATED
    return "interrupted", INTERRUPTED


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises `Terminated` once; the next ends the process.

    A handler that somebody has installed stays, and so does that of a rank of torchrun: where one rank fails, the
    others get SIGTERM in a collective that does not return to Python.
    """
    is_main = threading.current_thread() is threading.main_thread()  # only this thread handles signals
    if not is_main or "RANK" in os.environ or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    pid = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != pid:  # a forked child of the subject ends as without ampcheck
            os.kill(os.getpid(), number)
        raise Terminated

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
