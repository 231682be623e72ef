"""Findings of a matrix: what pays, and which fast cells are wrong. No torch runs here.

Nothing fails: a mode that does not pay is a fact about the model, and no defect of it.
"""

from __future__ import annotations

from ampcheck.catalog.speed import SPEEDUP
from ampcheck.core.check import Evidence
from ampcheck.core.run import Finding
from ampcheck.speed.matrix.stats import UNDECIDED, WRONG, Cell, MatrixStats
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
        hint = "raise the budget, or leave other work off this machine"
        return SPEEDUP.undecided(name, message, where=WHERE, hint=hint)
    message = f"none of {len(timed)} cells is right and {_least(stats.noise)}"
    return SPEEDUP.passed(name, message, len(timed), where=WHERE)


def _least(noise: float) -> str:
    return f"more than {100 * max(EFFECT, noise):.2g} % faster than eager float32"


def _speed(cell: Cell) -> str:
    assert cell.ratio is not None
    return f"{cell.name}: {cell.ratio.median:.3g} times as fast ({cell.ratio.low:.3g} to {cell.ratio.high:.3g})"
