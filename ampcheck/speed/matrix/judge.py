"""The run of a matrix: findings, the table of cells, and the speedups as a chart."""

from __future__ import annotations

import math
from collections import Counter

from ampcheck.checks import findings
from ampcheck.core.limits import Limits
from ampcheck.core.run import Chart, Coverage, Run, Scalar, Series, Table
from ampcheck.records.matrix import SLOW, Cell, MatrixStats
from ampcheck.speed.threads import meanwhile

_COLUMNS = (
    "mode", "precision", "ms a step", "times as fast", "verdict", "accuracy", "error", "than eager, same precision",
    "peak, MiB", "compiling, s", "graphs", "has paid after",
)  # fmt: skip


def matrix_run(stats: MatrixStats) -> Run:
    """Findings, the table of cells, the chart of their speedups."""
    timed = [cell for cell in stats.cells if cell.ratio is not None]
    judged = [cell for cell in stats.cells if cell.accuracy not in ("", "skip")]
    return Run(
        environment={**stats.fingerprint, **meanwhile(stats.conditions, stats.threads)},
        findings=tuple(findings(stats, Limits())),
        coverage=Coverage(
            {"cells": len(timed), "judged cells": len(judged)},
            dict(Counter(cell.reason for cell in stats.cells if cell.reason)),
        ),
        tables=(matrix_table(stats),),
        charts=(_speedups(timed),) if timed else (),
        title=f"modes and precisions of {stats.subject}",
    )


def matrix_table(stats: MatrixStats) -> Table:
    """The cells; one that was not measured gives the reason instead of a verdict."""
    noise = f"up to {100 * stats.noise:.2g} %" if math.isfinite(stats.noise) else "not known, of so few"
    apart = ""
    if names := [cell.name for cell in stats.cells if cell.apart]:
        apart = (
            f"More than {SLOW:g} times as slow, or of a precision with such, and timed in a measurement of their own "
            f"with eager float32 and its twin, {stats.apart:,} cycles: {'; '.join(names)}. "
        )
    note = (
        f"Times as fast as eager float32: median of {stats.cycles:,} paired cycles, 95 % bootstrap interval; noise "
        f"between eager float32 and its twin {noise}. {apart}Accuracy: the worst verdict of the checks against "
        "float64; error: the largest relative one of an output. Compiling: the first call beyond a typical one, with "
        "empty caches. Has paid after: calls, against eager mode in the same precision. Peak: tensors of one step "
        "beyond those at its beginning, on an accelerator with what it keeps, such as a pool of CUDA graphs."
    )
    note += f" All arms {stats.threads.fewer}." if stats.threads and stats.threads.fewer else ""
    title = ", ".join(filter(None, (stats.subject, stats.size, f"on {stats.device}")))
    return Table(title, _COLUMNS, [_row(cell) for cell in stats.cells], check="speedup", note=note)


def _row(cell: Cell) -> tuple[Scalar, ...]:
    if cell.ratio is None:
        return (cell.mode, cell.precision, None, None, cell.reason, *[None] * 7)
    return (
        cell.mode,
        cell.precision,
        round(1000 * cell.seconds, 3),
        str(cell.ratio) if cell.verdict else "1",
        cell.verdict or "reference",
        cell.accuracy or "not judged",
        None if cell.error is None else float(f"{cell.error:.2g}"),
        None if cell.gain is None else str(cell.gain),
        None if cell.peak is None else round(cell.peak / 2**20, 2),
        None if cell.compiling is None else round(cell.compiling, 2),
        f"{cell.graphs}, {cell.breaks} breaks" if cell.breaks else cell.graphs or None,
        None if cell.break_even is None else str(cell.break_even),
    )


def _speedups(timed: list[Cell]) -> Chart:
    series = []
    for cell in timed:
        if (ratio := cell.ratio) is not None and cell.verdict:
            points = [ratio.p05, ratio.low, ratio.median, ratio.high, ratio.high]
            series.append(Series(cell.name, points, group=cell.precision))
    note = "5th percentile of the paired ratios, then the interval of their median."
    unit = "times as fast as eager float32"
    return Chart("range", "speed of each cell", unit, series=series, check="speedup", note=note, scale="linear")
