"""The table of the results of a compiled run."""

from __future__ import annotations

from collections.abc import Sequence

from ampcheck.core.run import Scalar, Table
from ampcheck.records.accuracy import AccuracyStats, unknown
from ampcheck.records.results import WITHIN

ROWS = 60


def tables(stats: AccuracyStats) -> tuple[Table, ...]:
    """Every result with its errors and limit, the nearest to its limit first."""
    if not stats.errors:
        return ()
    rows: list[Sequence[Scalar]] = []
    for e in sorted(stats.errors, key=lambda e: e.times, reverse=True)[:ROWS]:
        verdict = "beyond" if e.verdict != WITHIN else "not comparable" if unknown(e) else "within"
        rows.append((e.kind, e.name, e.step, e.dtype, e.eager_error, e.whole, e.limit, verdict))
    note = "relative to float64, Euclidean norms"
    if len(stats.errors) > ROWS:
        note = f"the {ROWS} nearest to their limit of {len(stats.errors)}; {note}"
    columns = ("kind", "name", "step", "dtype", "eager", "compiled", "limit", "verdict")
    return (Table(f"Eager and compiled: {stats.name}", columns, rows, "compiled-error", note),)
