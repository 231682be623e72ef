"""The tables that a run of low precision leaves behind."""

from __future__ import annotations

import math

from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Scalar, Table, Where
from ampcheck.records.numerics import NumericsStats
from ampcheck.records.results import PRECISION

ROWS = 60
"""Rows of one table; beyond it the worst are shown."""

_NEAR = 16
"""Factor below the maximum of its format within which the largest value of an op gives it a row."""


def tables(stats: NumericsStats, limits: Limits) -> tuple[Table, ...]:
    """Where each output and gradient lies against its limit, and the ops that lost values."""
    return tuple(table for table in (_errors(stats, limits), _ops(stats)) if table is not None)


def _errors(stats: NumericsStats, limits: Limits) -> Table | None:
    rows: list[tuple[float, tuple[Scalar, ...]]] = []
    for error in stats.errors:
        limit = error.limit * limits.precision / PRECISION
        verdict = "beyond" if error.beyond(limits.precision) else "within" if error.known else "not comparable"
        if verdict == "within" and error.error > limit:
            verdict = "beyond, too small to matter"
        row = (error.kind, error.name or "(root)", error.dtype, error.error, error.seen.spread, limit, verdict)
        rows.append((error.error / limit if error.known else -1.0, row))
    if not rows:
        return None
    rows.sort(key=lambda row: -row[0] if not math.isnan(row[0]) else -math.inf)
    note = "relative to float64, Euclidean norms, of the worst row where one is beyond its limit; spread: the data's"
    if len(rows) > ROWS:
        note = f"the {ROWS} nearest to their limit of {len(rows)}; {note}"
    columns = ("kind", "name", "dtype", "error", "spread", "limit", "verdict")
    rows_shown = [row for _, row in rows[:ROWS]]
    return Table(f"Error against float64: {stats.name}", columns, rows_shown, "precision-loss", note)


def _ops(stats: NumericsStats) -> Table | None:
    rows: list[tuple[Scalar, ...]] = []
    for fault in stats.faults:
        seen, place = fault.examination, _place(fault.where)
        measured = fault.dtype, seen.error, seen.limit, fault.elements, fault.amax_out, len(fault.reaches)
        rows.append((fault.kind, *place[:3], *measured, place[3]))
    for (where, dtype), (result, _) in stats.largest.items():
        scaled = where.phase == "backward" and stats.scale != 1  # its size follows from the loss scale
        if not scaled and result * _NEAR > format_of(dtype).max:
            place = _place(where)
            rows.append(("near the maximum", *place[:3], dtype, 0.0, 0.0, 0, result, 0, place[3]))
    if not rows:
        return None
    note = "kinds as in ampcheck.shadow; reaches: results, gradients and decisions that the damage is left in"
    if len(rows) > ROWS:
        note = f"the first {ROWS} of {len(rows)}; {note}"
    columns = (
        "kind", "phase", "module", "op", "dtype", "error", "limit", "elements", "amax", "reaches", "source"
    )  # fmt: skip
    return Table(f"Ops that lost or nearly lost values: {stats.name}", columns, rows[:ROWS], "flush", note)


def _place(where: Where) -> tuple[str, str, str, str]:
    return where.phase, where.module or "(root)", where.op, where.place
