"""The end of a process in which PyTorch has run: Python's teardown takes two seconds, and may fail."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


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
