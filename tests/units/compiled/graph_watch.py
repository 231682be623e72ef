"""`ampcheck.watch` with the checks of graphs alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ampcheck import Run, watch
from ampcheck.compiled.graph.checks import COMPILER_CHECKS
from ampcheck.core.limits import GraphLimits
from ampcheck.records.graphs import GraphStats


@dataclass
class Observed:
    run: Run | None = None
    stats: GraphStats | None = None


@contextmanager
def observe_graphs(
    *, max_breaks: int = 0, max_recompiles: int = 0, subject: str = "this block", raises: bool = True
) -> Iterator[Observed]:
    observed, graphs = Observed(), GraphLimits(max_breaks, max_recompiles)
    context = watch(checks=COMPILER_CHECKS, graphs=graphs, name=subject, fail_on="fail" if raises else "never")
    seen = None
    try:
        with context as seen:
            yield observed
    finally:
        if seen is not None:
            observed.run, observed.stats = seen.run, seen.stats.graphs
