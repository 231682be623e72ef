"""Requires: Each arm, such as the compiled model, is at least a given number of times as fast as the reference, such as
eager mode. Undecided if the machine is too noisy or the time too short.

Measured: All arms take turns, block by block, in random order in one process, each twice a cycle; the difference
between the two runs of the reference, its A/A twin, is the noise. The ratio is the median of the paired ratios. It
fails when the exact interval of the median is below the limit and the median is below it by more than the minimum
effect (3 %). The confidence of the interval accounts for every comparison of the suite and every look at the growing
data, so that at most one suite in a hundred fails without a cause. It is not comparable if reference and twin differ by
more than the minimum effect and the arm by no more than they do.

Causes: Graph breaks, recompilations, a step so short that guards and launches cost more than fusion saves, eager
kernels that are as good already, memory-bound work in which nothing can be fused, casts of autocast.

Fix: Check ampcheck.assert_compiled first, then a profile; compare modes with ampcheck speed --matrix. If undecided,
raise the budget, or leave other work off the machine.
"""

from __future__ import annotations

import math

from ampcheck.checks.speed import WHERE, explain, requirement, show_ratio
from ampcheck.core.check import Check, Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.text import counted
from ampcheck.records.matrix import UNDECIDED, WRONG, Cell, MatrixStats
from ampcheck.records.speed import EFFECT, NOISE, STRADDLES, ArmComparison

CHECK = Check("speedup", "speed", __doc__, unit="times as fast", needs=("ArmComparison", "MatrixStats"), order=800)

_LONGEST = 3600
"""Seconds of a budget that a hint may advise."""


def check(record: ArmComparison | MatrixStats, limits: Limits) -> list[Finding]:
    """An arm is as fast as its rule requires; of a matrix, which cells pay."""
    return [_of_arm(record)] if isinstance(record, ArmComparison) else _of_matrix(record)


def _of_arm(comparison: ArmComparison) -> Finding:
    stats, arm, rule, decision = comparison.stats, comparison.arm, comparison.rule, comparison.decision
    reference = stats.reference.name
    required = requirement(arm.name, rule.limit, reference)
    observed = f"it is {show_ratio(decision, rule)}, in {stats.cycles:,} paired cycles"
    observed += f"; its first call took {arm.first:.0f} s" if arm.first >= 1 else ""
    if stats.threads is not None and stats.threads.fewer:
        observed += f"; it {stats.threads.fewer}"
    message = explain(decision, rule, required, observed, reference, comparison.noise)
    budget = _budget(comparison)
    hint = {
        NOISE: f"{budget}, leave other work off this machine, or use a larger minimum effect",
        STRADDLES: f"{budget}, or leave other work off this machine",
        "": "torch.profiler shows where the time goes; of compiled code look at graph breaks and recompilations "
        "first (ampcheck.assert_compiled)",
    }[decision.reason]
    if stats.cycles < comparison.needed:
        few = f"{counted(stats.cycles, 'cycles')} {'is' if stats.cycles == 1 else 'are'} too few"
        message = f"{required}; {few}, {comparison.needed} are needed"
        hint = f"{budget}, or let one step do less work"
    if decision.verdict is Verdict.UNDECIDED and stats.threads is not None and stats.threads.crowded:
        message += f"; {stats.threads.crowded}"
        hint += "; OMP_NUM_THREADS=1 leaves a core to the other processes" if stats.threads.used > 1 else ""
    evidence = Evidence(where=WHERE, observed=decision.ratio, limit=rule.limit, hint=hint)
    return CHECK.judged(decision.verdict, stats.subject, message, stats.cycles, **evidence)


def _budget(comparison: ArmComparison) -> str:
    """The advice on the budget: with which the arm would be decided, the noise and the ratio staying as they are."""
    stats, decision, rule, cycles = comparison.stats, comparison.decision, comparison.rule, comparison.needed
    if decision.verdict is not Verdict.UNDECIDED or not stats.spent:
        return "raise the budget"
    if stats.cycles >= cycles:
        # The interval shrinks with the root of the cycles, and has to leave out the floor, or the limit. A ratio that
        # may be the limit is taken for it; twice as many cycles leave room for chance.
        ratio, low, high = (math.log(value) for value in (decision.ratio, decision.low, decision.high))
        limit, floor = math.log(rule.limit), math.log(rule.floor)
        ratio = limit if low <= limit <= high else ratio
        share = (high - low) / 2 / (ratio - floor if ratio > floor else limit - ratio)
        cycles = round(min(2 * stats.cycles * max(share, 1.0) ** 2, 1e12))
    seconds = math.ceil(1.2 * cycles * stats.spent / stats.cycles)
    if seconds > _LONGEST:
        return "raise the budget: the ratio is so near the limit that it would take more than an hour"
    return f"raise the budget (--budget {seconds}: about as many seconds are needed, and {stats.spent:.2g} were spent)"


def _of_matrix(stats: MatrixStats) -> list[Finding]:
    """The fastest cell that pays and is right; a warning for each that is fast and wrong, or broken.

    PASS: a cell pays and was judged to be right, or none pays. UNDECIDED: of some it is not known whether they pay, or
    whether they are right. SKIP: none was measured.
    """
    findings = [_best(stats)]
    for cell in stats.cells:
        if cell.verdict == WRONG and cell.ratio is not None:
            text = (
                f"a fast cell with wrong numbers is no win; {cell.name} is {cell.ratio.median:.3g} times as fast: "
                f"{cell.why}"
            )
            hint = "ampcheck blame names the stage, the op and the module"
            findings.append(CHECK.warn(stats.subject, text, where=WHERE, hint=hint))
        elif cell.failed:
            text = f"each cell that this machine can run must run; {cell.name} was not measured: {cell.reason}"
            hint = "ampcheck.assert_compiled reports more" if cell.mode != "eager" else ""
            findings.append(CHECK.warn(stats.subject, text, where=WHERE, hint=hint))
    if stats.recompiled:
        text = (
            f"times must be of code that is compiled already; {stats.recompiled} graphs were compiled while the arms "
            "were timed"
        )
        hint = "ampcheck.assert_compiled reports recompilations"
        findings.append(CHECK.warn(stats.subject, text, where=WHERE, hint=hint))
    return findings


def _best(stats: MatrixStats) -> Finding:
    name, best, paying = stats.subject, stats.best, stats.paying
    timed = [cell for cell in stats.cells if cell.ratio is not None and cell.verdict]
    if not timed:
        reason = next((cell.reason for cell in stats.cells if cell.reason), "no cell was measured")
        return CHECK.skip(name, f"nothing was compared: {reason}", where=WHERE)
    first = best or (paying[0] if paying else None)
    if first is not None and first.ratio is not None:
        evidence = Evidence(where=WHERE, observed=first.ratio.median, limit=1 + EFFECT, unit="times as fast")
        message = f"a cell pays that is {_least(first.noise)} and right; of {len(timed)} the fastest "
        if best is None:
            why = f": {first.why}" if first.why else ""
            message += f"is {_speed(first)}, and its numbers were not judged{why}"
            evidence["hint"] = "compare its outputs with those of eager float32"
            return CHECK.undecided(name, message, **evidence)
        message += f"such is {_speed(best)}" + ("" if best.accuracy == "pass" else f", accuracy {best.accuracy}")
        message += "" if paying[0] is best else f"; not judged is {_speed(paying[0])}"
        return CHECK.passed(name, message, len(timed), **evidence)
    if undecided := [cell.name for cell in timed if cell.verdict == UNDECIDED]:
        message = f"none of {len(timed)} cells is surely faster than eager float32; undecided: {'; '.join(undecided)}"
        message += f"; {stats.threads.crowded}" if stats.threads and stats.threads.crowded else ""
        hint = "raise the budget, or leave other work off this machine"
        return CHECK.undecided(name, message, where=WHERE, hint=hint)
    message = f"none of {len(timed)} cells is right and {_least(EFFECT)}"  # the noise has been subtracted
    return CHECK.passed(name, message, len(timed), where=WHERE)


def _least(noise: float) -> str:
    return f"more than {100 * max(EFFECT, noise):.2g} % faster than eager float32"


def _speed(cell: Cell) -> str:
    assert cell.ratio is not None
    return f"{cell.name}: {cell.ratio.median:.3g} times as fast ({cell.ratio.low:.3g} to {cell.ratio.high:.3g})"
