"""The tables and charts that a run of low precision leaves behind."""

from __future__ import annotations

import math

from ampcheck.core.formats import FORMATS, format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Band, Chart, Scalar, Series, Table, Where
from ampcheck.health import TensorHealth
from ampcheck.numerics.findings import who
from ampcheck.numerics.stats import NumericsStats
from ampcheck.shadow.compare import PRECISION

ROWS = 60
"""Rows of one table or chart; beyond it the worst are shown."""

_NEAR = 16
"""How far below the maximum of its format the largest value of an op lies that has a row."""


def tables(stats: NumericsStats, limits: Limits) -> tuple[Table, ...]:
    """Where each output and gradient lies against its limit, and the ops that lost values."""
    return tuple(table for table in (_errors(stats, limits), _ops(stats)) if table is not None)


def charts(stats: NumericsStats) -> tuple[Chart, ...]:
    """Where the values of each module lie against the range of the formats, as powers of two."""
    rows: list[tuple[float, Series]] = []
    for (phase, module), health in stats.health.items():
        span = _span(health)
        if span is not None:
            rows.append((span[-1] - span[0], Series(module or "(root)", span, group=phase)))
    if not rows:
        return ()
    shown = rows
    note = "forward: results of modules; backward: gradients of parameters, samples of each"
    if stats.scale != 1:
        note += f"; the loss scale of backward is {stats.scale:g}"
    if len(rows) > ROWS:
        widest = sorted(rows, key=lambda row: row[0], reverse=True)[:ROWS]
        shown = [row for row in rows if row in widest]
        note = f"the {ROWS} widest of {len(rows)} rows; {note}"
    names = ("float16", "bfloat16") if stats.format == "float16" else (stats.format,)
    return (
        Chart(
            "range",
            f"Where the values of each module lie: {who(stats)}",
            "magnitude, as a power of two",
            series=tuple(series for _, series in shown),
            bands=tuple(band for name in names for band in _bands(name)),
            check="headroom",
            note=note,
        ),
    )


def _bands(name: str) -> tuple[Band, Band]:
    fmt = FORMATS[name]
    small, normal, top = (math.log2(v) for v in (fmt.smallest_subnormal, fmt.smallest_normal, fmt.max))
    return Band(f"{name} subnormal", small, normal), Band(f"{name} normal", normal, top)


def _span(health: TensorHealth) -> tuple[float, float, float, float, float] | None:
    """Smallest, 5th percentile, median, 95th percentile and largest magnitude, as powers of two."""
    if not health.nonzero or health.histogram is None:
        return None
    low, middle, high = (health.quantile_exponent(q) for q in (0.05, 0.5, 0.95))
    if low is None or middle is None or high is None:
        return None
    least, most = math.log2(health.amin), math.log2(health.amax)
    # A quantile is known to its binade; its middle is half an exponent up, and never outside what was seen.
    inner = [min(max(e + 0.5, least), most) for e in (low, middle, high)]
    return least, inner[0], inner[1], inner[2], most


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
    return Table(f"Error against float64: {who(stats)}", columns, rows_shown, "precision-loss", note)


def _ops(stats: NumericsStats) -> Table | None:
    rows: list[tuple[Scalar, ...]] = []
    for fault in stats.faults:
        seen, place = fault.examination, _place(fault.where)
        left = len(fault.reaches)
        rows.append((fault.kind, *place[:3], fault.dtype, seen.error, seen.limit, fault.elements, fault.amax_out, left))
        rows[-1] = (*rows[-1], place[3])
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
    return Table(f"Ops that lost or nearly lost values: {who(stats)}", columns, rows[:ROWS], "flush", note)


def _place(where: Where) -> tuple[str, str, str, str]:
    source = f"{where.file}:{where.line}" if where.file else ""
    return where.phase, where.module or "(root)", where.op, source
