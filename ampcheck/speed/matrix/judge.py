"""The run of a matrix: what pays, a table for each workload, and the speedups as a chart."""

from __future__ import annotations

import math

from ampcheck.core.run import Chart, Coverage, Run, Scalar, Series, Table
from ampcheck.speed.matrix.checks import check_matrix
from ampcheck.speed.matrix.stats import SLOW, Cell, MatrixStats, WorkloadStats
from ampcheck.speed.stats import Ratio

COLUMNS = (
    "mode", "precision", "ms a step", "times as fast", "verdict", "accuracy", "error", "than eager, same precision",
    "peak, MiB", "compiling, s", "graphs", "has paid after",
)  # fmt: skip


def matrix_run(stats: MatrixStats) -> Run:
    """Findings, one table for each workload, one chart."""
    cells = list(stats.cells)
    unseen: dict[str, int] = {}
    for _, cell in cells:
        if cell.reason:
            unseen[cell.reason] = unseen.get(cell.reason, 0) + 1
    return Run(
        environment=_environment(stats),
        findings=tuple(check_matrix(stats)),
        coverage=Coverage(
            {
                "workloads": len(stats.workloads),
                "cells": sum(cell.ratio is not None for _, cell in cells),
                "judged cells": sum(bool(cell.accuracy) and cell.accuracy != "skip" for _, cell in cells),
            },
            unseen,
        ),
        tables=tuple(matrix_table(workload) for workload in stats.workloads),
        charts=(_speedups(stats),) if any(cell.ratio for _, cell in cells) else (),
        title="modes and precisions",
    )


def _environment(stats: MatrixStats) -> dict[str, Scalar]:
    """What all workloads were measured on, once; what differs between them, such as the load, for each by its name."""
    found: dict[str, Scalar] = {}
    for workload in stats.workloads:
        for name, value in workload.fingerprint.items():
            shared = all(other.fingerprint.get(name) == value for other in stats.workloads)
            found[name if shared else f"{workload.workload}: {name}"] = value
        found |= {f"{workload.workload}, meanwhile: {name}": value for name, value in workload.conditions.items()}
    return found


def matrix_table(stats: WorkloadStats) -> Table:
    """The cells of one workload; one that was not measured says why in the place of its verdict."""
    noise = f"up to {100 * stats.noise:.2g} %" if math.isfinite(stats.noise) else "not known, of so few"
    note = (
        f"Times as fast as eager float32: median of {stats.cycles:,} paired cycles, 95 % bootstrap interval; noise "
        f"between eager float32 and its twin {noise}. {_apart(stats)}Accuracy: the worst of what the judges say "
        "against float64; error: the largest relative one of an output. Compiling: the first call beyond a typical "
        "one, with empty caches. Has paid after: calls, against eager mode in the same precision. Peak: tensors of one "
        "step beyond what is held when it begins, on an accelerator with what it keeps, such as a pool of CUDA graphs."
    )
    return Table(
        f"{stats.workload}, {stats.size}, on {stats.device}",
        COLUMNS,
        [_row(cell) for cell in stats.cells],
        check="speedup",
        note=note,
    )


def _apart(stats: WorkloadStats) -> str:
    names = [cell.name for cell in stats.cells if cell.apart]
    if not names:
        return ""
    return (
        f"Much slower (more than {SLOW:g} times), or of a precision that has such, and timed in a measurement of "
        f"their own with eager float32 and its twin, {stats.apart:,} cycles, so that they do not take the time of the "
        f"others: {'; '.join(names)}. "
    )


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
    rows = [
        Series(
            f"{workload.workload}: {cell.name}",
            [cell.ratio.p05, cell.ratio.low, cell.ratio.median, cell.ratio.high, cell.ratio.high],
            group=cell.precision,
        )
        for workload, cell in stats.cells
        if cell.ratio is not None and cell.verdict
    ]
    note = "5th percentile of the paired ratios, then the interval of their median."
    return Chart(
        "range", "speed of each cell", "times as fast as eager float32", series=rows, check="speedup", note=note,
        scale="linear",
    )  # fmt: skip
