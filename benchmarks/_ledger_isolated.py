"""Run functions in processes of their own, several at a time: what one does to its process cannot reach another.

A process is forked from this one, in which torch is imported and nothing has run, so that it starts in milliseconds.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

_Item = TypeVar("_Item")
_PATIENCE = 6
"""Times as many seconds of the clock as of the processor: other work may share the machine."""


class EndedError(Exception):
    """A process ended without a result, by a signal or an exit of its own."""


class OutOfTimeError(Exception):
    """A process was ended after its seconds."""


@dataclass
class _Running(Generic[_Item]):
    item: _Item
    process: BaseProcess
    results: Connection
    folder: str
    deadline: float

    def end(self) -> None:
        try:
            os.killpg(self.process.pid or 0, signal.SIGKILL)  # its own children, too
        except (ProcessLookupError, PermissionError):
            self.process.kill()
        self.process.join()
        self.results.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _child(function: Callable[[], Any], results: Connection, folder: str, seconds: int) -> None:
    faulthandler.disable()  # where pytest enabled it, a crash would be printed
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "inductor")
    with (
        open(Path(folder) / "printed", "w", encoding="utf-8") as printed,
        open(os.devnull, encoding="utf-8") as nothing,
    ):
        os.dup2(nothing.fileno(), 0)
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    results.send(function())
    results.close()
    os._exit(0)  # without the hooks and threads that the case has left


def isolated(
    items: Iterable[_Item], function: Callable[[_Item], Any], *, jobs: int, seconds: Callable[[_Item], int]
) -> Iterator[tuple[_Item, Any]]:
    """Each item with the result of the function, or with the `EndedError` or `OutOfTimeError` that took its place.

    seconds: of a processor that an item may take.
    """
    context = multiprocessing.get_context("fork")
    waiting, running = iter(items), list[_Running[_Item]]()

    def start(item: _Item) -> None:
        folder = tempfile.mkdtemp(prefix="ledger-")
        receive, send = context.Pipe(duplex=False)
        limit = seconds(item)
        process = context.Process(target=_child, args=(lambda: function(item), send, folder, limit))
        process.start()
        send.close()
        running.append(_Running(item, process, receive, folder, time.monotonic() + _PATIENCE * limit))

    try:
        while True:
            while len(running) < jobs and (item := next(waiting, None)) is not None:
                start(item)
            if not running:
                return
            ready = wait([one.results for one in running], timeout=1.0)
            for one in [*running]:
                # a process that outlives the case may hold its pipe open
                if one.results in ready or one.process.exitcode is not None or time.monotonic() > one.deadline:
                    running.remove(one)
                    yield one.item, _result(one)
    finally:
        for one in running:
            one.end()


def _result(one: _Running[Any]) -> Any:
    over = one.process.is_alive() and not one.results.poll()
    try:
        return OutOfTimeError() if over else one.results.recv() if one.results.poll() else _ending(one)
    except EOFError:
        return _ending(one)
    finally:
        one.end()


def _ending(one: _Running[Any]) -> Exception:
    """Why a process has no result."""
    one.process.join()
    code = one.process.exitcode or 0
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return OutOfTimeError() if name in ("SIGXCPU", "SIGKILL") else EndedError(name)
