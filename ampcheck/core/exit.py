"""The end of a process that has taken part in a process group."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn


def exit_without_teardown(code: int) -> NoReturn:
    """End this process now: while Python tears down, threads of process groups abort it now and then (SIGABRT)."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
