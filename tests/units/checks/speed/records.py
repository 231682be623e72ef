"""Starts of a subject, by hand."""

from __future__ import annotations

from typing import Any

from ampcheck.records.graphs import Graph, GraphStats
from ampcheck.records.startup import COLD, EAGER, FX, WARM, Launch, Lookup, StartupArm, StartupStats

GRAPHS = GraphStats("model", graphs=(Graph("forward", 4, 1.0),))
HIT = Lookup(FX, "hit")


def launch(*lookups: Lookup, **facts: Any) -> Launch:
    """One that compiled a graph."""
    return Launch(1.0, 1.0, 1.0, (2.0, 0.1), lookups=lookups, **({"graph": GRAPHS, "memory": 100} | facts))


def starts(warm: Launch, cold: Launch | None = None, eager: Launch | None = None) -> StartupStats:
    """Eager mode, empty caches and warm ones."""
    first = launch(Lookup(FX, "miss", parts={"code": "a"}))
    pairs = ((EAGER, eager or launch(graph=None)), (COLD, cold or first), (WARM, warm))
    arms = tuple(StartupArm(name, "default", (start,)) for name, start in pairs)
    return StartupStats("model", arms, {"artifacts": "not asked for"})
