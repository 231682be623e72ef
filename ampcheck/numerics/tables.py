"""The tables and charts that a run of low precision leaves behind."""

from __future__ import annotations

import math
from dataclasses import replace

from ampcheck.core.formats import FORMATS, format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Band, Chart, Scalar, Series, Table
from ampcheck.health import TensorHealth
from ampcheck.numerics.findings import who
from ampcheck.numerics.stats import NumericsStats
from ampcheck.telemetry.checks import telemetry_tables

ROWS = 60
"""Rows of one table or chart; beyond it the worst are shown."""


def tables(stats: NumericsStats, limits: Limits) -> tuple[Table, ...]:
    """Where each output, module and gradient lies against its limit, and the ops that lost values; of compiled code
    what was measured inside its graphs."""
    inside = telemetry_tables(replace(stats.inside, subject=who(stats))) if stats.inside is not None else ()
    return (*(table for table in (_errors(stats, limits), _losses(stats)) if table is not None), *inside)


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
    note = (
        f"{stats.reference} is the reference; the loss scale of backward is {stats.scale:g}" if stats.scale != 1 else ""
    )
    if len(rows) > ROWS:
        widest = sorted(rows, key=lambda row: row[0], reverse=True)[:ROWS]
        shown = [row for row in rows if row in widest]
        note = f"the {ROWS} widest of {len(rows)} rows. {note}".strip()
    names = ("float16", "bfloat16") if stats.format == "float16" else (stats.format,)
    bands = tuple(band for name in names for band in _bands(name))
    return (
        Chart(
            "range",
            f"Where the values of each module lie: {who(stats)}",
            "magnitude, as a power of two",
            series=tuple(series for _, series in shown),
            bands=bands,
            check="headroom" if not stats.compiled else "coverage",
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
        limit = stats.error_limit(error, limits.precision)
        verdict = (
            "beyond" if stats.beyond(error, limits.precision) else "within" if stats.known(error) else "not comparable"
        )
        if verdict == "within" and error.error > limit:
            verdict = "beyond, too small to matter"
        row = (error.kind, error.name or "(root)", error.dtype, error.error, error.sensitivity, limit, verdict)
        rows.append((error.error / limit if stats.known(error) else -1.0, row))
    if not rows:
        return None
    rows.sort(key=lambda row: -row[0] if not math.isnan(row[0]) else -math.inf)
    note = (
        f"relative to {stats.reference}, Euclidean norms; {stats.chain} roundings in a row, factor {limits.precision:g}"
    )
    if len(rows) > ROWS:
        note = f"the {ROWS} nearest to their limit of {len(rows)}; {note}"
    columns = ("kind", "name", "dtype", "error", "sensitivity", "limit", "verdict")
    return Table(
        f"Error against {stats.reference}: {who(stats)}", columns, [r for _, r in rows[:ROWS]], "precision-loss", note
    )


def _losses(stats: NumericsStats) -> Table | None:
    rows: list[tuple[Scalar, ...]] = []
    for fact in stats.ops:
        scaled = fact.where.phase == "backward" and stats.scale != 1  # its size follows from the loss scale
        room = format_of(fact.dtype).max / fact.amax if fact.amax and not scaled else math.inf
        if fact.produced or fact.flushed or fact.inexact or room < 16:
            place = f"{fact.where.file}:{fact.where.line}" if fact.where.file else ""
            row = (
                fact.where.phase,
                fact.where.module or "(root)",
                fact.where.op,
                fact.dtype,
                fact.produced,
                fact.flushed,
            )
            rows.append((*row, fact.flushed_share, fact.inexact, fact.amax, place))
    if not rows:
        return None
    note = f"the first {ROWS} of {len(rows)}" if len(rows) > ROWS else ""
    columns = (
        "phase", "module", "op", "dtype", "inf or NaN", "flushed", "norm lost", "inexact integers", "amax", "source"
    )  # fmt: skip
    return Table(f"Ops that lost or nearly lost values: {who(stats)}", columns, rows[:ROWS], "flush", note)
