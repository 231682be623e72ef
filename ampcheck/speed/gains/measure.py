"""Measures the gains of torch.compile and autocast for one model: a row of figures, with the matrix that they come
from."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run, Scalar, Table
from ampcheck.core.subject import Subject
from ampcheck.records.matrix import Cell, MatrixStats
from ampcheck.records.speed import EAGER, Ratio
from ampcheck.records.startup import COLD, WARM, StartupArm, StartupStats
from ampcheck.speed.matrix.judge import matrix_run
from ampcheck.speed.matrix.measure import cache_of, measure_matrix
from ampcheck.speed.options import SpeedOptions
from ampcheck.speed.startup.measure import Launcher
from ampcheck.speed.steps import StepConfig

FIGURES = "Compilation"
"""The title of the table with the row of figures."""

BUDGET = 10.0
"""Seconds of timed blocks."""

MODE = "default"

COMPILED, COMPILED_LOW, AUTOCAST, BOTH = "compiled", "compiled, bfloat16", "autocast", "autocast, compiled"
GAINS = (COMPILED, COMPILED_LOW, AUTOCAST, BOTH)
"""Ratios of a row, each paired and followed by its interval: compiled as against eager code in float32 and in bfloat16,
and bfloat16 autocast, eager and compiled, as against eager float32."""


def measure_compilation(subject: Subject, target: str, device: str = "cpu") -> Run:
    """Compiled and eager, in float32 and under bfloat16 autocast, timed in turn, judged, and started cold and warm.

    target: by which fresh processes load the subject. Raises `UsageError` for a subject that runs by itself, such as a
    training loop, or that compiles by itself.
    """
    modes, precisions = (EAGER, MODE), ("float32", "bfloat16")
    with tempfile.TemporaryDirectory(prefix="ampcheck-", ignore_cleanup_errors=True) as folder:
        caches = Path(folder)
        starts, failed = _starts(target, device, caches)
        stats = measure_matrix(subject, modes=modes, precisions=precisions, device=device, budget=BUDGET, caches=caches)
    run, figures = matrix_run(_without_cost(stats) if starts else stats), _figures(stats, starts, failed)
    table = Table(FIGURES, tuple(figures), [tuple(figures.values())], check="speedup")
    return replace(run, tables=(table, *run.tables), title=f"compilation of {subject.name}")


def _starts(target: str, device: str, caches: Path) -> tuple[StartupStats | None, str]:
    """A start with empty caches, one with those that it filled, and an eager one, each in a process of its own.

    None and the reason where one fails; the matrix uses the compiled code of float32.
    """
    config = StepConfig(MODE)
    launcher = Launcher(target, caches, SpeedOptions(), device)
    arms = []
    try:
        for name, start in ((COLD, config), (WARM, config), (EAGER, replace(config, mode=EAGER))):
            # Numbered 1: the first of an arm is also timed in its steady state, which the matrix does.
            launch = launcher.launch(name, start, cache=cache_of(start), number=1)
            arms.append(StartupArm(name, str(config), (launch,)))
    except UsageError as error:
        return None, str(error)
    return StartupStats(target, tuple(arms)), ""


def _without_cost(stats: MatrixStats) -> MatrixStats:
    """The figures without the cost of compiling float32, whose code the cold start has compiled."""
    known = stats.cell(MODE, "float32")
    cells = (replace(cell, compiling=None, break_even=None) if cell == known else cell for cell in stats.cells)
    return replace(stats, cells=tuple(cells))


def _figures(stats: MatrixStats, starts: StartupStats | None, failed: str) -> dict[str, Scalar]:
    compiled, low = stats.cell(MODE, "float32"), stats.cell(MODE, "bfloat16")
    cold, warm = (starts.arm(name) if starts is not None else None for name in (COLD, WARM))
    graph = cold.launches[0].graph if cold is not None else None
    figures: dict[str, Scalar] = {
        "compiles": _compiles(compiled),
        "graphs": compiled.graphs,
        "breaks": compiled.breaks,
        "recompiles": None if graph is None else len(graph.recompiles),
        "cold s": None if starts is None or cold is None else round(starts.cost(cold)[0], 2),
        "warm s": None if starts is None or warm is None else round(starts.cost(warm)[0], 2),
    }
    cells = {"float32": compiled, "bfloat16": low, "autocast": stats.cell(EAGER, "bfloat16")}
    ratios = {
        COMPILED: _right(compiled, compiled.ratio),
        COMPILED_LOW: _right(low, low.gain),
        AUTOCAST: _right(cells["autocast"], cells["autocast"].ratio),
        BOTH: _right(low, low.ratio),
    }
    for name, ratio in ratios.items():
        figures |= _interval(name, ratio)
    for name, cell in cells.items():
        figures[f"error, {name}"] = None if cell.error is None else float(f"{cell.error:.2g}")
        figures[f"accuracy, {name}"] = cell.accuracy or "not judged"
    for name, cell in (("eager", stats.cell(EAGER, "float32")), ("compiled", compiled)):
        figures[f"peak MiB, {name}"] = None if cell.peak is None else round(cell.peak / 2**20, 2)
    reasons = [f"{cell.name}: {cell.reason}" for cell in cells.values() if cell.reason]
    if failed and not compiled.reason:
        reasons.append(f"starts: {failed}")
    return {**figures, "reason": "; ".join(reasons)}


def _right(cell: Cell, ratio: Ratio | None) -> Ratio | None:
    """The gain of a cell whose numbers are not wrong."""
    return None if cell.accuracy == "fail" else ratio


def _compiles(cell: Cell) -> str:
    if cell.reason:
        return "not"
    return "with breaks" if cell.breaks else "whole"


def _interval(name: str, ratio: Ratio | None) -> dict[str, Scalar]:
    values = (None,) * 3 if ratio is None else (ratio.median, ratio.low, ratio.high)
    ends = ("", " low", " high")
    return {f"{name}{end}": None if value is None else round(value, 4) for end, value in zip(ends, values, strict=True)}
