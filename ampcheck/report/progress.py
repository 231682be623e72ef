"""How far a long run is, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ampcheck.core.progress import Progress

EVERY = 10.0
"""Seconds between two lines if stderr is no terminal, as in the log of a CI job."""


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on a terminal, occasional lines elsewhere; on stderr, so that stdout contains only the report."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield show


def _lines() -> Progress:
    """Print a line every `EVERY` seconds; a shorter run prints none."""
    begin = last = time.monotonic()

    def show(stage: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= EVERY:
            last = now
            print(f"ampcheck: {now - begin:.0f} s, {done} of {total} done, now: {stage}", file=sys.stderr, flush=True)

    return show
