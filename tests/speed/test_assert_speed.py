"""`assert_speed` raises for a FAIL and for nothing else, and leaves the evidence in its run."""

from __future__ import annotations

import pytest
from simulated import SimulatedClock, taking

import ampcheck
from ampcheck import Verdict, assert_speed


def test_an_arm_that_is_fast_enough_passes_with_its_evidence() -> None:
    run = assert_speed(
        {"eager": taking(0.02), "compiled": taking(0.01)}, at_least=1.5, clock=SimulatedClock(), subject="net"
    )
    (finding,) = run.findings
    assert (finding.check, finding.verdict, finding.subject) == ("speedup", Verdict.PASS, "net")
    assert run.coverage.seen["paired cycles"] > 20
    assert [row[0] for row in run.tables[0].rows] == ["eager", "A/A twin", "compiled"]
    assert run.tables[0].rows[2][2] == pytest.approx(2.0, rel=0.02)


def test_an_arm_that_is_too_slow_fails_the_test() -> None:
    with pytest.raises(AssertionError, match=r"compiled must be at least 1\.5 times as fast as eager"):
        assert_speed({"eager": taking(0.01), "compiled": taking(0.01)}, at_least=1.5, clock=SimulatedClock())


def test_what_cannot_be_decided_raises_nothing_and_is_told() -> None:
    run = assert_speed({"eager": taking(0.01), "compiled": taking(0.0108)}, clock=SimulatedClock(noise=0.3), budget=0.5)
    assert [finding.verdict for finding in run.findings] == [Verdict.UNDECIDED]


def test_each_arm_may_have_a_limit_of_its_own_and_those_without_are_shown_only() -> None:
    arms = {"eager": taking(0.03), "default": taking(0.02), "max-autotune": taking(0.01)}
    run = assert_speed(arms, at_least={"max-autotune": 2.5}, clock=SimulatedClock())
    assert [finding.message.split(" must")[0] for finding in run.findings] == ["max-autotune"]
    assert len(run.tables[0].rows) == 4


@pytest.mark.parametrize(
    ("at_least", "found"),
    [({}, "names no arm to judge"), ({"eager": 1.0}, "'eager'"), ({"typo": 1.0}, "'typo'"), ("1.2", "'1.2'")],
)
def test_a_limit_that_judges_nothing_is_refused_before_anything_runs(at_least: object, found: str) -> None:
    def never() -> float:
        raise AssertionError("ran")

    with pytest.raises(ampcheck.UsageError, match=found):
        assert_speed({"eager": never, "compiled": never}, at_least=at_least)  # type: ignore[arg-type]


def test_its_run_is_collected_like_every_other_and_survives_json() -> None:
    with ampcheck.collect() as runs:
        run = assert_speed({"a": taking(0.01), "b": taking(0.01)}, clock=SimulatedClock())
    assert runs == [run]
    assert ampcheck.Run.from_json(run.to_json()).findings == run.findings


def test_real_steps_are_timed_by_the_real_clock() -> None:
    run = assert_speed(
        {"short": lambda: sum(range(1000)), "long": lambda: sum(range(20_000))}, at_least=0.001, budget=0.3
    )
    short, _, long = run.tables[0].rows
    assert short[1] < long[1]  # type: ignore[operator]
