"""Judges a compiled run: its graphs, the state that it leaves, and its coverage. No torch runs."""

from __future__ import annotations

from collections.abc import Sequence

from ampcheck.checks import findings
from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.checks.always.coverage import of_graphs
from ampcheck.checks.compile import cache_artifacts, cudagraph, eager_fallback, graph_break, recompile
from ampcheck.core.check import Check
from ampcheck.core.limits import GraphLimits
from ampcheck.core.run import Finding, Scalar, Table, Verdict
from ampcheck.records.graphs import GraphStats, Recompile

COMPILER_CHECKS = tuple(str(one.CHECK) for one in (graph_break, recompile, eager_fallback, cache_artifacts, cudagraph))
"""The names of the checks that only graphs have."""

GRAPH_CHECKS = (*COMPILER_CHECKS, "autocast-state", str(COVERAGE))
"""The names of the checks on graphs."""

_ROWS = 60
"""Rows of one table."""


def check_graph(stats: GraphStats, limits: GraphLimits) -> list[Finding]:
    """Every verdict on a compiled run."""
    if stats.unsupported:
        return [COVERAGE.skip(stats.subject, f"graphs were not judged: {stats.unsupported}")]
    judged = findings(stats, limits)
    return [*judged, *of_graphs(stats, any(f.verdict is Verdict.FAIL for f in judged))]


def tables(stats: GraphStats) -> tuple[Table, ...]:
    """Graphs with their compile time, recompilations by kind, breaks, caches and modes; empty ones are left out."""
    graphs = [(g.frame, g.ops, round(g.seconds, 2), "after the warm-up" if g.late else "") for g in stats.graphs]
    again = [(r.kind, r.frame, r.guard, _counted(r, stats)) for r in stats.recompiles]
    breaks = [(each.where.place, each.times, each.reason) for each in stats.breaks]
    columns_and_rows: tuple[tuple[str, tuple[str, ...], Sequence[Sequence[Scalar]], Check], ...] = (
        ("Graphs", ("frame", "ops", "compile seconds", "when"), graphs, COVERAGE),
        ("Recompilations", ("kind", "frame", "guard that failed", "counted"), again, recompile.CHECK),
        ("Graph breaks", ("line", "times in one call", "reason"), breaks, graph_break.CHECK),
        ("Compiler caches", ("cache", "count"), list(stats.caches.items()), cache_artifacts.CHECK),
        ("Graphs of each mode", ("mode", "new graphs"), list(stats.modes.items()), recompile.CHECK),
    )
    return tuple(
        Table(
            f"{title}: {stats.subject}",
            columns,
            list(rows[:_ROWS]),
            check.slug,
            f"the first {_ROWS} of {len(rows)}" if len(rows) > _ROWS else "",
        )
        for title, columns, rows, check in columns_and_rows
        if rows
    )


def _counted(again: Recompile, stats: GraphStats) -> str:
    if again.late:
        return "yes, after the warm-up"
    return "yes" if recompile.counts(again, stats) else "no, it shows what varies"
