"""Lines on standard error about a test that takes seconds, although pytest captures what tests print."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ampcheck.core.heartbeat import Heartbeat
from ampcheck.core.progress import Listener, listening


@contextmanager
def reported(item: pytest.Item, descriptor: int) -> Iterator[None]:
    """Report the test, and the stage of the audit in it, every few seconds. descriptor: of standard error."""

    def show(stage: str, done: int, total: int) -> None:
        beat.step(f"{item.name}: {stage} ({done} of {total} done)")

    with heartbeat(item.name, descriptor) as beat, listening(Listener(progress=show)):
        yield


def heartbeat(step: str, descriptor: int) -> Heartbeat:
    """Report a step every few seconds. descriptor: of standard error."""
    begun: list[str] = []

    def say(line: str) -> None:
        begin = "" if begun else "\n"  # pytest's own line has no end yet
        begun.append(line)
        os.write(descriptor, f"{begin}ampcheck: {line}\n".encode(errors="replace"))

    return Heartbeat(say, step)
