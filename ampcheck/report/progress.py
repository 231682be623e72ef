"""Progress of a long run, on stderr, so that stdout contains only the report."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ampcheck.core.heartbeat import Heartbeat
from ampcheck.core.text import clean

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


_BEGIN = "loading"
"""The stage before the first that is named."""


class ProgressBar:
    """A progress callback. shown: a bar on a terminal, else lines. aloud: a line for each stage as it begins."""

    def __init__(self, shown: Bar | Heartbeat, *, aloud: bool = False) -> None:
        self._shown, self._aloud = shown, aloud
        self._task = shown.add_task(_BEGIN, total=None) if not isinstance(shown, Heartbeat) else None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show the stage that begins."""
        if isinstance(self._shown, Heartbeat):
            # The import of torch may hold the interpreter for long, and the thread of the heartbeat with it.
            aloud = self._aloud or (done == 0 and "torch" not in sys.modules)
            self._shown.step(f"{done} of {total} done, now: {stage}", aloud=aloud)
        elif self._task is not None:
            self._shown.update(self._task, description=stage, completed=done, total=total)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar off the terminal, so that a report can be printed."""
        if isinstance(self._shown, Heartbeat):
            yield
            return
        self._shown.stop()
        try:
            yield
        finally:
            self._shown.start()


def say(line: str) -> None:
    """Print a line about a step; under torchrun on rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        print(clean(f"ampcheck: {line}"), file=sys.stderr, flush=True)


@contextmanager
def progress_bar(*, aloud: bool = False) -> Iterator[ProgressBar]:
    """A bar on a terminal; elsewhere a line every few seconds. aloud: of each stage, too."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        with Heartbeat(say, _BEGIN) as heartbeat:
            yield ProgressBar(heartbeat, aloud=aloud)
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
