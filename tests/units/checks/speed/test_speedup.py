"""The check speedup, on records."""

from __future__ import annotations

from ampcheck.checks.speed.speedup import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.records.matrix import DOES_NOT, PAYS, WRONG, Cell, MatrixStats
from ampcheck.records.matrix import UNDECIDED as OPEN
from ampcheck.records.speed import NOISE, ArmComparison, ArmTimes, Decision, Ratio, Rule, SpeedStats

LIMITS = Limits()
ARM = ArmTimes("compiled", (1.0,) * 20)
STATS = SpeedStats("model", (ArmTimes("eager", (1.0,) * 20), ArmTimes("A/A twin", (1.0,) * 20), ARM), spent=2.0)


def arm(verdict: Verdict, ratio: float, reason: str = "", needed: int = 9) -> ArmComparison:
    decision = Decision(verdict, ratio, 0.9 * ratio, 1.1 * ratio, reason)
    return ArmComparison(STATS, ARM, Rule(1.2), decision, 0.01, needed)


def test_an_arm_is_judged_by_its_interval() -> None:
    (fast,) = check(arm(Verdict.PASS, 2.0), LIMITS)
    assert (fast.verdict, fast.observed, fast.limit, fast.seen, fast.hint) == (Verdict.PASS, 2.0, 1.2, 20, "")
    (slow,) = check(arm(Verdict.FAIL, 0.5), LIMITS)
    assert "compiled must be at least 1.2 times as fast as eager" in slow.message
    assert "it is 0.5 times as fast, 0.45 to 0.55" in slow.message
    (noisy,) = check(arm(Verdict.UNDECIDED, 1.2, NOISE), LIMITS)
    assert noisy.message.startswith("not comparable: eager and its own twin differ")
    (few,) = check(arm(Verdict.UNDECIDED, 1.2, NOISE, needed=40), LIMITS)
    assert few.message.endswith("20 cycles are too few, 40 are needed")
    assert "--budget 5" in few.hint


def cell(mode: str, verdict: str, ratio: float = 2.0, **facts: object) -> Cell:
    measured = Ratio(ratio, 0.9 * ratio, 1.1 * ratio)
    return Cell(mode, "float32", ratio=measured, verdict=verdict, **facts)  # type: ignore[arg-type]


def test_the_fastest_cell_that_is_right_passes_and_a_wrong_one_warns() -> None:
    cells = cell("default", PAYS, accuracy="pass"), cell("max", WRONG, 3.0, why="errors"), Cell("x", "y", "no", True)
    best, wrong, failed = check(MatrixStats("model", cells, recompiled=0), LIMITS)
    assert (best.verdict, best.observed, best.seen) == (Verdict.PASS, 2.0, 2)
    assert (wrong.verdict, "max, float32 is 3 times as fast: errors" in wrong.message) == (Verdict.WARN, True)
    assert (failed.verdict, "x, y was not measured: no" in failed.message) == (Verdict.WARN, True)


def test_cells_that_do_not_pay_or_may_are_said_so() -> None:
    (none,) = check(MatrixStats("model", (cell("default", DOES_NOT),)), LIMITS)
    assert (none.verdict, none.seen) == (Verdict.PASS, 1)
    (unsure,) = check(MatrixStats("model", (cell("default", OPEN),)), LIMITS)
    assert unsure.verdict is Verdict.UNDECIDED
    (unjudged,) = check(MatrixStats("model", (cell("default", PAYS),)), LIMITS)
    assert (unjudged.verdict, "its numbers were not judged" in unjudged.message) == (Verdict.UNDECIDED, True)
    nothing, spoilt = check(MatrixStats("model", (Cell("a", "b", "no device"),), recompiled=2), LIMITS)
    assert (nothing.verdict, nothing.message) == (Verdict.SKIP, "nothing was compared: no device")
    assert (spoilt.verdict, "2 graphs were compiled" in spoilt.message) == (Verdict.WARN, True)
