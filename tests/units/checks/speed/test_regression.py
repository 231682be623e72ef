"""The check regression, on records."""

from __future__ import annotations

from datetime import datetime, timezone

from ampcheck.checks.speed.regression import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.records.history import Change, Point, SpeedSeries, Times, Trend
from ampcheck.records.speed import (
    UNCHANGED,
    Baseline,
    Decision,
    HeadComparison,
    MissingTests,
    Rule,
    SpeedRecord,
    StoredComparison,
)

LIMITS = Limits()
SLOWER, SAME = Decision(Verdict.FAIL, 0.8, 0.75, 0.85), Decision(Verdict.PASS, 1.0, 0.99, 1.01)


def head(decision: Decision | None = None, **facts: object) -> HeadComparison:
    plain = {"launches": 3, "cycles": 90, "deviation": 0.02, "noise": 0.01}
    return HeadComparison("model", "base (a1b2)", Rule(), decision=decision, **(plain | facts))  # type: ignore[arg-type]


def test_the_head_beside_its_base() -> None:
    (slower,) = check(head(SLOWER), LIMITS)
    assert (slower.verdict, slower.observed, slower.limit) == (Verdict.FAIL, 0.8, 1.0)
    assert "head must be no slower than base (a1b2)" in slower.message
    assert "in 3 launches of each side and 90 paired cycles; launches of one code differ by 2 %" in slower.message
    (same,) = check(head(SAME), LIMITS)
    assert (same.verdict, same.seen) == (Verdict.PASS, 90)
    eager, arm = check(head(SLOWER, judged="compiled", eager=SLOWER, speedups=(2.0, 1.9)), LIMITS)
    assert (eager.verdict, arm.verdict) == (Verdict.WARN, Verdict.FAIL)
    assert "compiled is 25 % slower and eager is 25 % slower (speedup over eager 2 on base, 1.9 on head)" in arm.message


def test_a_base_without_times_is_not_compared() -> None:
    (failed,) = check(head(failure="no such file"), LIMITS)
    assert (failed.verdict, failed.message) == (
        Verdict.UNDECIDED,
        "not comparable: the base (a1b2) does not run the target: no such file",
    )
    assert [f.verdict for record in (head(), head(stopped=UNCHANGED)) for f in check(record, LIMITS)] == [
        Verdict.SKIP
    ] * 2


def record(ratio: float, name: str = "t.py::test_a", **facts: object) -> SpeedRecord:
    plain: dict[str, object] = {
        "low": 0.99 * ratio,
        "high": 1.01 * ratio,
        "p05": ratio,
        "minimum": ratio,
        "noise": 0.01,
    }
    return SpeedRecord(name, "eager", "compiled", ratio, cycles=50, **(plain | facts))  # type: ignore[arg-type]


def points(*values: float) -> SpeedSeries:
    when = datetime(2026, 1, 31, tzinfo=timezone.utc)
    several = tuple(Point(when, record(value), f"{number:010d}") for number, value in enumerate(values))
    return SpeedSeries(several[0].key, several)


def trend(series: SpeedSeries, *changes: Change) -> Trend:
    return Trend(series, changes, 0.03, Verdict.WARN, least=20, newest=5)


def test_the_last_points_of_a_history() -> None:
    series = points(*[1.3] * 20, *[1.0] * 6)
    change = Change(20, 20, 20, 24, 1.0 / 1.3, 0.75, 0.79, 1.3, 1.0)
    (fell,) = check(trend(series, change), LIMITS)
    assert (fell.verdict, fell.limit, fell.unit) == (Verdict.WARN, -3.0, "%")
    assert "from 1.300 to 1.000, after 0000000019 (2026-01-31), the last good one" in fell.message
    assert fell.hint.startswith("git log 0000000019..0000000020")
    (back,) = check(trend(points(*[1.3] * 20, 1.0, *[1.3] * 5), change), LIMITS)
    assert (back.verdict, back.message[-17:]) == (Verdict.PASS, " and was reversed")
    (few,) = check(trend(points(1.0)), LIMITS)
    assert (few.verdict, few.observed, few.limit) == (Verdict.UNDECIDED, 1, 20)
    times = Point(datetime(2026, 1, 31, tzinfo=timezone.utc), Times("t", 0.5))
    (absolute,) = check(trend(SpeedSeries(times.key, (times,))), LIMITS)
    assert absolute.verdict is Verdict.SKIP


def stored(new: SpeedRecord, *old: SpeedRecord, effect: float | None = 0.075) -> list[Verdict]:
    baseline = Baseline.of_records(old, "the history")
    return [finding.verdict for finding in check(StoredComparison(new, baseline, effect), LIMITS)]


def test_a_session_beside_an_earlier_one() -> None:
    assert stored(record(1.3), record(1.3)) == [Verdict.PASS]
    assert stored(record(1.0), record(1.3)) == [Verdict.WARN]
    assert stored(record(1.3, noise=0.5), record(1.3)) == [Verdict.UNDECIDED]
    assert stored(record(1.3, precision="bfloat16"), record(1.3)) == [Verdict.UNDECIDED]
    assert stored(record(1.3), record(1.3, name="t.py::test_b")) == [Verdict.WARN]
    assert stored(record(1.3), record(1.3), effect=None) == []
    assert stored(record(1.3), record(1.3, fingerprint={"device": "another"}), effect=None) == [Verdict.UNDECIDED]
    (missing,) = check(MissingTests("the history", ("t.py::test_b",)), LIMITS)
    assert "this session did not run 1 of them: t.py::test_b" in missing.message
