"""How many graphs torch.compile made while a subject ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ampcheck.compiler import counters, reset


@dataclass(slots=True)
class Graphs:
    """count: graphs that were compiled; unseen: why code ran outside them, with how often; unsupported: that Dynamo
    declines the whole, in its own words."""

    count: int = 0
    unsupported: str = ""
    unseen: dict[str, int] = field(default_factory=dict)


@contextmanager
def measure_graphs() -> Iterator[Graphs]:
    """Count the graphs that are compiled inside.

    Dynamo is reset on the way in and out: copies of one model share their code object, whose cache would fill up and
    then fall back to eager without a word. Functions that the caller had compiled are compiled again when next called.
    """
    reset()
    before = {group: counters(group) for group in ("stats", "graph_break", "unimplemented")}
    graphs = Graphs()
    try:
        yield graphs
    finally:
        since = {group: counters(group) - known for group, known in before.items()}
        graphs.count = since["stats"]["unique_graphs"]
        graphs.unseen = {f"graph break: {_first(reason)}": n for reason, n in since["graph_break"].items()}
        declined = [*since["unimplemented"], *since["graph_break"]]
        graphs.unsupported = _first(declined[0]) if declined and not graphs.count else ""
        reset()


def _first(reason: str) -> str:
    return reason.strip().splitlines()[0] if reason.strip() else "no reason given"
