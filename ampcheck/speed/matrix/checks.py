"""What a matrix says: what pays for each workload, and which fast cells are no win. No torch runs here.

Nothing fails: a mode that does not pay is a fact about the model, and not a defect of it.
"""

from __future__ import annotations

from ampcheck.core.run import Finding, Verdict, Where, passed
from ampcheck.speed.matrix.stats import WRONG, Cell, MatrixStats, WorkloadStats
from ampcheck.speed.verdict import EFFECT

WHERE = Where(phase="speed")


def check_matrix(stats: MatrixStats) -> list[Finding]:
    """For each workload the fastest cell that pays and is right; a warning for each that is fast and wrong, or broken.

    PASS: a cell pays and was judged to be right, or none pays. UNDECIDED: of some it is not known whether they pay, or
    whether they are right. SKIP: none was measured.
    """
    check = "speedup"
    found = []
    for workload in stats.workloads:
        verdict, message, ratio, hint = _best(workload)
        limit, unit = (1 + EFFECT, "times as fast") if ratio else (None, "")
        if verdict is Verdict.PASS:
            seen = len([cell for cell in workload.cells if cell.ratio is not None and cell.verdict])
            name = workload.workload
            found.append(passed(check, name, message, seen, where=WHERE, observed=ratio, limit=limit, unit=unit))
        else:
            found.append(Finding(check, verdict, workload.workload, message, WHERE, ratio, limit, unit, hint))
        found += [
            Finding(check, Verdict.WARN, workload.workload, text, WHERE, hint=knob)
            for cell in workload.cells
            for text, knob in _warnings(cell)
        ]
        if workload.recompiled:
            text = (
                f"times must be of code that is compiled already; {workload.recompiled} graphs were compiled while the "
                "arms were timed"
            )
            found.append(Finding(check, Verdict.WARN, workload.workload, text, WHERE, hint="see ampcheck.assert_graph"))
    if not found:
        found.append(Finding(check, Verdict.SKIP, "matrix", "no workload was measured"))
    return found


def _best(workload: WorkloadStats) -> tuple[Verdict, str, float | None, str]:
    timed = [cell for cell in workload.cells if cell.ratio is not None and cell.verdict]
    if not timed:
        reason = next((cell.reason for cell in workload.cells if cell.reason), "no cell was measured")
        return Verdict.SKIP, f"nothing was compared: {reason}", None, ""
    best, paying = workload.best, workload.paying
    if best is not None and best.ratio is not None:
        message = (
            f"a cell pays that is {_least(best.noise)} and right; of {len(timed)} the fastest such is {_speed(best)}"
            + ("" if best.accuracy == Verdict.PASS.value else f", accuracy {best.accuracy}")
            + ("" if paying[0] is best else f"; not judged is {_speed(paying[0])}")
        )
        return Verdict.PASS, message, best.ratio.median, ""
    if paying and paying[0].ratio is not None:
        first = paying[0]
        message = (
            f"a cell pays that is {_least(first.noise)} and right; of {len(timed)} the fastest is {_speed(first)}, and "
            f"its numbers were not judged{': ' if first.why else ''}{first.why}"
        )
        return Verdict.UNDECIDED, message, paying[0].ratio.median, "compare its outputs with those of eager float32"
    open_ = [cell.name for cell in timed if cell.verdict == "undecided"]
    if open_:
        message = f"none of {len(timed)} cells is surely faster than eager float32; undecided: {'; '.join(open_)}"
        return Verdict.UNDECIDED, message, None, "raise the budget, or leave other work off this machine"
    message = f"none of {len(timed)} cells is right and {_least(workload.noise)}"
    return Verdict.PASS, message, None, ""


def _least(noise: float) -> str:
    return f"more than {100 * max(EFFECT, noise):.2g} % faster than eager float32"


def _speed(cell: Cell) -> str:
    ratio = cell.ratio
    return (
        "" if ratio is None else f"{cell.name}: {ratio.median:.3g} times as fast ({ratio.low:.3g} to {ratio.high:.3g})"
    )


def _warnings(cell: Cell) -> list[tuple[str, str]]:
    if cell.verdict == WRONG and cell.ratio is not None:
        faster = f"{cell.name} is {cell.ratio.median:.3g} times as fast"
        text = f"a fast cell with wrong numbers is no win; {faster}: {cell.why}"
        return [(text, "ampcheck blame names the stage, the op and the module")]
    if cell.failed:
        knob = "ampcheck.assert_compiled and assert_graph tell more" if cell.mode != "eager" else ""
        return [(f"each cell that this machine can run must run; {cell.name} was not measured: {cell.reason}", knob)]
    return []
