"""The run of a matrix: findings, a table for each workload, and the speedups as a chart."""

from __future__ import annotations

import math
from collections import Counter

from ampcheck.core.run import Chart, Coverage, Run, Scalar, Series, Table
from ampcheck.speed.matrix.checks import check_matrix
from ampcheck.speed.matrix.stats import SLOW, Cell, MatrixStats, WorkloadStats
from ampcheck.speed.stats import Ratio

_COLUMNS = (
    "mode", "precision", "ms a step", "times as fast", "verdict", "accuracy", "error", "than eager, same precision",
    "peak, MiB", "compiling, s", "graphs", "has paid after",
)  # fmt: skip


def matrix_run(stats: MatrixStats) -> Run:
    """Findings, one table for each workload, one chart."""
    cells = [cell for _, cell in stats.cells]
    timed = [cell for cell in cells if cell.ratio is not None]
    seen = {
        "workloads": len(stats.workloads),
        "cells": len(timed),
        "judged cells": sum(bool(cell.accuracy) and cell.accuracy != "skip" for cell in cells),
    }
    return Run(
        environment=_environment(stats),
        findings=tuple(check_matrix(stats)),
        coverage=Coverage(seen, dict(Counter(cell.reason for cell in cells if cell.reason))),
        tables=tuple(matrix_table(workload) for workload in stats.workloads),
        charts=(_speedups(stats),) if timed else (),
        title="modes and precisions",
    )


def _environment(stats: MatrixStats) -> dict[str, Scalar]:
    """Entries that all workloads share, once; those that differ, such as the load, by the name of the workload."""
    environment: dict[str, Scalar] = {}
    for workload in stats.workloads:
        for name, value in workload.fingerprint.items():
            shared = all(other.fingerprint.get(name) == value for other in stats.workloads)
            environment[name if shared else f"{workload.workload}: {name}"] = value
        for name, value in workload.conditions.items():
            environment[f"{workload.workload}, meanwhile: {name}"] = value
    return environment


def matrix_table(stats: WorkloadStats) -> Table:
    """The cells of one workload; one that was not measured gives the reason instead of a verdict."""
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
    title = ", ".join(filter(None, (stats.workload, stats.size, f"on {stats.device}")))
    return Table(title, _COLUMNS, [_row(cell) for cell in stats.cells], check="speedup", note=note)


def _row(cell: Cell) -> tuple[Scalar, ...]:
    if cell.ratio is None:
        return (cell.mode, cell.precision, None, None, cell.reason, *[None] * 7)
    return (
        cell.mode,
        cell.precision,
        round(1000 * cell.seconds, 3),
        shown(cell.ratio) if cell.verdict else "1",
        cell.verdict or "reference",
        cell.accuracy or "not judged",
        None if cell.error is None else float(f"{cell.error:.2g}"),
        None if cell.gain is None else shown(cell.gain),
        None if cell.peak is None else round(cell.peak / 2**20, 2),
        None if cell.compiling is None else round(cell.compiling, 2),
        f"{cell.graphs}, {cell.breaks} breaks" if cell.breaks else cell.graphs or None,
        None if cell.break_even is None else str(cell.break_even),
    )


def shown(ratio: Ratio) -> str:
    """A ratio with its interval."""
    return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def _speedups(stats: MatrixStats) -> Chart:
    series = []
    for workload, cell in stats.cells:
        if (ratio := cell.ratio) is not None and cell.verdict:
            points = [ratio.p05, ratio.low, ratio.median, ratio.high, ratio.high]
            series.append(Series(f"{workload.workload}: {cell.name}", points, group=cell.precision))
    note, unit = (
        "5th percentile of the paired ratios, then the interval of their median.",
        "times as fast as eager float32",
    )
    return Chart("range", "speed of each cell", unit, series=series, check="speedup", note=note, scale="linear")
