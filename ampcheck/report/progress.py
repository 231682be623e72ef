"""How far a long run is."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ampcheck.core.progress import Progress

EVERY = 10.0
"""Seconds between two lines where stderr is no terminal, as in the log of a CI job."""


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on a terminal, now and then a line elsewhere; on stderr, so that stdout holds the report alone."""
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

        def tell(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield tell


def _lines() -> Progress:
    """A short run says nothing, a long one where it is."""
    begin = last = time.monotonic()

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= EVERY:
            last = now
            print(f"ampcheck: {now - begin:.0f} s, {done} of {total} done, now: {stage}", file=sys.stderr, flush=True)

    return tell
