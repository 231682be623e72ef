"""The end of a process: by SIGTERM, and where PyTorch has run, as Python's teardown takes two seconds and may fail."""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn


def open_standard_files() -> None:
    """Open empty streams in a process that was started without stdin, stdout or stderr (`>&-`).

    Otherwise the next file would get their number, and native code would print into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115


@contextmanager
def kept_open() -> Iterator[None]:
    """Let code inside that closes stdout or stderr only flush them: the report is printed after it."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    for stream in streams:
        stream.close = stream.flush  # type: ignore[method-assign]
    try:
        yield
    finally:
        for stream in streams:
            del stream.close


def run_exit_handlers() -> None:
    """Do what Python does before its teardown: wait for threads that are no daemons, and run the exit handlers."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def exit_without_teardown(code: int) -> NoReturn:
    """End this process now: while Python tears down, threads of process groups abort it now and then (SIGABRT)."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextmanager
def sigterm_raises(error: BaseException, once: bool = False) -> Iterator[None]:
    """SIGTERM raises `error`. A handler that somebody has installed stays. once: the next ends the process."""
    is_main = threading.current_thread() is threading.main_thread()  # only this thread handles signals
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    pid = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:
        forked = os.getpid() != pid
        if once or forked:
            signal.signal(number, signal.SIG_DFL)
        if forked:  # a child of the subject ends as without ampcheck
            os.kill(os.getpid(), number)
        raise error

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
