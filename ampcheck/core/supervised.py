"""Work in a child process, whose end is its parent's to report: whatever ends it, no exit code is 0 without a verdict.

The child is forked before anything heavy is imported, and has the terminal, the process group and all files of its
parent. It hands its exit code over through a pipe; without that, the work did not come to its end.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from ampcheck.core.exit import open_standard_files

_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals that somebody may send to the parent alone, and that are meant for the child."""

_ENDS_BOTH = ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE")
"""Signals that end the parent as they ended the child: somebody sent them on purpose."""

_PATIENCE = 0.2
"""Seconds in which a child says that it got a signal that was sent to the process group."""

_PR_SET_PDEATHSIG = 1


def supervised(work: Callable[[Callable[[int], None]], NoReturn]) -> int:
    """Do work in a child process and return the exit code that it handed over.

    work: ends its process, after it has called its argument with the exit code; later exit handlers do not change it.
    Returns 2, with a sentence on standard error, for a child that ends before: by `os._exit`, C's `exit`, `exec` or a
    crash. Without `os.fork` (Windows) the work is done in this process.
    """
    open_standard_files()  # else a pipe would get the number of one that is closed
    if not hasattr(os, "fork"):
        work(lambda code: None)
    results, handed = os.pipe()
    received, woken = os.pipe()
    child = os.fork()
    if not child:
        os.close(results)
        os.close(received)
        _begin_child(woken)
        pid = os.getpid()
        work(lambda code: _hand_over(code, handed) if os.getpid() == pid else None)
    os.close(handed)
    os.close(woken)
    _forward_signals(child, received)
    _, status = os.waitpid(child, 0)
    result = os.read(results, 1)
    return result[0] if result else _ended_early(os.waitstatus_to_exitcode(status))


def _begin_child(woken: int) -> None:
    """Report each signal that arrives, and end with the parent."""
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _hand_over(code: int, pipe: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with suppress(OSError):  # closed by the subject
        os.write(pipe, bytes([code & 0xFF]))
        os.close(pipe)


def _forward_signals(child: int, received: int) -> None:
    """Forward signals to the child unless it got them too, as a terminal sends them to the whole process group."""

    def forward(number: int, frame: FrameType | None) -> None:
        ready, _, _ = select.select([received], [], [], _PATIENCE)
        if not ready or ((data := os.read(received, 4096)) and number not in data):
            os.kill(child, number)

    for name in _FORWARDED:
        number = getattr(signal, name)
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)


def _ended_early(code: int) -> int:
    """The exit code for a child that handed over none; it ends as the child where somebody ended that on purpose."""
    how = f"with exit code {code}"
    if code < 0:
        with suppress(ValueError):
            how = f"by {signal.Signals(-code).name}"
        if how.removeprefix("by ") in _ENDS_BOTH:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    text = (
        "incomplete: the process that judged ended {} before it had a verdict, by the subject (os._exit, exit, exec) "
    )
    text += "or by a crash in native code; python -X faulthandler -m ampcheck shows where"
    print(f"ampcheck: {text.format(how)}", file=sys.stderr, flush=True)
    return 2
