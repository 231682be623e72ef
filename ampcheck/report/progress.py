"""How far a long run is, on stderr, so that stdout contains only the report."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

EVERY = 10.0
"""Seconds between two lines if stderr is no terminal, as in the log of a CI job."""


class ProgressBar:
    """A progress callback. bar: on a terminal; None prints a line every `every` seconds, and none of a shorter run."""

    def __init__(self, bar: Bar | None, every: float = EVERY) -> None:
        self._bar, self._every = bar, every
        self._task = bar.add_task("", total=None) if bar is not None else None
        self._begin = self._last = time.monotonic()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show the stage that begins."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=stage, completed=done, total=total)
            return
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            text = f"ampcheck: {now - self._begin:.0f} s, {done} of {total} done, now: {stage}"
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar off the terminal, so that a report can be printed."""
        if self._bar is None:
            yield
            return
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()


@contextmanager
def progress_bar(every: float = EVERY) -> Iterator[ProgressBar]:
    """A bar on a terminal; elsewhere a line at most every `every` seconds, 0 for one of each stage."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressBar(None, every)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        yield ProgressBar(bar)
