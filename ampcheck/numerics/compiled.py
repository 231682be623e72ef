"""How many graphs torch.compile made while a subject ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


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
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    graphs = Graphs()
    try:
        yield graphs
    finally:
        graphs.count = int(counters["stats"]["unique_graphs"])
        graphs.unseen = {f"graph break: {_first(reason)}": int(n) for reason, n in counters["graph_break"].items()}
        declined = [reason for name in ("unimplemented", "graph_break") for reason in counters[name]]
        graphs.unsupported = _first(declined[0]) if declined and not graphs.count else ""
        torch._dynamo.reset()


def _first(reason: str) -> str:
    return reason.strip().splitlines()[0] if reason.strip() else "no reason given"
