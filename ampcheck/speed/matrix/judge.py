"""The run of a matrix: findings, the table of cells, and the speedups as a chart."""

from __future__ import annotations

import math
from collections import Counter

from ampcheck.catalog.speed import SPEEDUP
from ampcheck.core.check import Evidence
from ampcheck.core.run import Chart, Coverage, Finding, Run, Scalar, Series, Table
from ampcheck.speed.matrix.stats import SLOW, UNDECIDED, WRONG, Cell, MatrixStats
from ampcheck.speed.threads import meanwhile
from ampcheck.speed.verdict import EFFECT, WHERE


def check_matrix(stats: MatrixStats) -> list[Finding]:
    """The fastest cell that pays and is right; a warning for each that is fast and wrong, or broken.

    PASS: a cell pays and was judged to be right, or none pays. UNDECIDED: of some it is not known whether they pay, or
    whether they are right. SKIP: none was measured.
    """
    findings = [_check_best(stats)]
    for cell in stats.cells:
        if cell.verdict == WRONG and cell.ratio is not None:
            text = (
                f"a fast cell with wrong numbers is no win; {cell.name} is {cell.ratio.median:.3g} times as fast: "
                f"{cell.why}"
            )
            hint = "ampcheck blame names the stage, the op and the module"
            findings.append(SPEEDUP.warn(stats.subject, text, where=WHERE, hint=hint))
        elif cell.failed:
            text = f"each cell that this machine can run must run; {cell.name} was not measured: {cell.reason}"
            hint = "ampcheck.assert_compiled reports more" if cell.mode != "eager" else ""
            findings.append(SPEEDUP.warn(stats.subject, text, where=WHERE, hint=hint))
    if stats.recompiled:
        text = (
            f"times must be of code that is compiled already; {stats.recompiled} graphs were compiled while the arms "
            "were timed"
        )
        hint = "ampcheck.assert_compiled reports recompilations"
        findings.append(SPEEDUP.warn(stats.subject, text, where=WHERE, hint=hint))
    return findings


def _check_best(stats: MatrixStats) -> Finding:
    name, best, paying = stats.subject, stats.best, stats.paying
    timed = [cell for cell in stats.cells if cell.ratio is not None and cell.verdict]
    if not timed:
        reason = next((cell.reason for cell in stats.cells if cell.reason), "no cell was measured")
        return SPEEDUP.skip(name, f"nothing was compared: {reason}", where=WHERE)
    first = best or (paying[0] if paying else None)
    if first is not None and first.ratio is not None:
        evidence = Evidence(where=WHERE, observed=first.ratio.median, limit=1 + EFFECT, unit="times as fast")
        message = f"a cell pays that is {_least(first.noise)} and right; of {len(timed)} the fastest "
        if best is None:
            why = f": {first.why}" if first.why else ""
            message += f"is {_speed(first)}, and its numbers were not judged{why}"
            evidence["hint"] = "compare its outputs with those of eager float32"
            return SPEEDUP.undecided(name, message, **evidence)
        message += f"such is {_speed(best)}" + ("" if best.accuracy == "pass" else f", accuracy {best.accuracy}")
        message += "" if paying[0] is best else f"; not judged is {_speed(paying[0])}"
        return SPEEDUP.passed(name, message, len(timed), **evidence)
    if undecided := [cell.name for cell in timed if cell.verdict == UNDECIDED]:
        message = f"none of {len(timed)} cells is surely faster than eager float32; undecided: {'; '.join(undecided)}"
        message += f"; {stats.threads.crowded}" if stats.threads and stats.threads.crowded else ""
        hint = "raise the budget, or leave other work off this machine"
        return SPEEDUP.undecided(name, message, where=WHERE, hint=hint)
    message = f"none of {len(timed)} cells is right and {_least(EFFECT)}"  # the noise has been subtracted
    return SPEEDUP.passed(name, message, len(timed), where=WHERE)


def _least(noise: float) -> str:
    return f"more than {100 * max(EFFECT, noise):.2g} % faster than eager float32"


def _speed(cell: Cell) -> str:
    assert cell.ratio is not None
    return f"{cell.name}: {cell.ratio.median:.3g} times as fast ({cell.ratio.low:.3g} to {cell.ratio.high:.3g})"


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
        findings=tuple(check_matrix(stats)),
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
