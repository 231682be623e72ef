"""Counts of compiled graphs, and reasons why code runs outside them."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ampcheck.torchtools.dynamo import counters, reset


@dataclass(slots=True)
class Graphs:
    """count: graphs that were compiled; unseen: why code ran outside them, with how often; unsupported: that Dynamo
    declines the whole, in its own words."""

    count: int = 0
    unsupported: str = ""
    declined: str = ""
    unseen: dict[str, int] = field(default_factory=dict)

    @property
    def why_none(self) -> str:
        """Why there are no graphs; "" where there are."""
        return "" if self.count else self.unsupported or "torch.compile made no graph"


def compilations() -> Callable[[], Graphs]:
    """A function that counts what Dynamo has compiled since this call; it returns the same record each time."""
    graphs = Graphs()
    before = {group: counters(group) for group in ("stats", "graph_break", "unimplemented")}

    def since() -> Graphs:
        found = {group: counters(group) - known for group, known in before.items()}
        declined = [*found["unimplemented"], *found["graph_break"]]
        graphs.count = found["stats"]["unique_graphs"]
        graphs.unseen = {f"graph break: {_first(reason)}": n for reason, n in found["graph_break"].items()}
        graphs.unsupported = _first(declined[0]) if declined and not graphs.count else ""
        graphs.declined = " ".join(declined[0].split("\n  Hint")[0].split()) if graphs.unsupported else ""
        return graphs

    return since


@contextmanager
def measure_graphs() -> Iterator[Graphs]:
    """Count the graphs that are compiled inside.

    Dynamo is reset on the way in and out: copies of one model share their code object, whose cache would fill up and
    silently fall back to eager. Functions that the caller had compiled are compiled again when next called.
    Dynamo's warnings are suppressed inside the block.
    """
    reset()
    since = compilations()
    try:
        with dynamo_warnings_suppressed():
            yield since()
    finally:
        since()
        reset()


@contextmanager
def dynamo_warnings_suppressed() -> Iterator[None]:
    """Make Dynamo log errors alone inside: findings report graph breaks and limits.

    A level that somebody asked for (`TORCH_LOGS`, `torch._logging.set_logs`) is not changed.
    """
    importlib.import_module("torch._dynamo")  # its import sets all levels
    log = logging.getLogger("torch._dynamo")
    level = log.level
    if level in (logging.NOTSET, logging.WARNING):
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _first(reason: str) -> str:
    return reason.strip().splitlines()[0] if reason.strip() else "no reason given"
