"""A line every few seconds about the step that runs, so that no long one looks stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

EVERY = 3.0
"""Seconds between two lines: on a busy machine, where a thread is late, still no more than five."""


class Heartbeat:
    """Reports the current step and its seconds every `every` seconds while it is entered.

    say: called with each line, in a thread of its own too.
    """

    def __init__(self, say: Callable[[str], None], step: str = "", every: float | None = None) -> None:
        self._say, self._step, self._every = say, step, EVERY if every is None else every
        self._begin = self._spoke = time.monotonic()
        self._ended, self._changed = False, threading.Condition()
        self._thread = threading.Thread(target=self._report, name="ampcheck-heartbeat", daemon=True)

    def step(self, name: str, *, aloud: bool = False) -> None:
        """Another step begins. aloud: report it at once."""
        with self._changed:
            self._step, self._begin = name, time.monotonic()
            if aloud:
                self._spoke = self._begin
                self._say(name)

    def __enter__(self) -> Heartbeat:
        self._begin = self._spoke = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    def _report(self) -> None:
        with self._changed:
            while not self._ended:
                now = time.monotonic()
                if now - self._spoke >= self._every:
                    self._spoke = now
                    self._say(f"{self._step}, {now - self._begin:.0f} s")
                self._changed.wait(self._spoke + self._every - now)
