"""`assert_speed` raises for a FAIL and for nothing else, and leaves the evidence in its run."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import SimulatedClock, taking

import ampcheck
from ampcheck import Finding, Run, Verdict, assert_speed
from ampcheck.core.limits import StartupLimits
from ampcheck.core.run import collect
from ampcheck.speed.base import judge as base_judge
from ampcheck.speed.options import SpeedOptions
from ampcheck.speed.startup import judge as startup_judge

SIMULATED = SpeedOptions(clock=SimulatedClock())


def test_an_arm_that_is_fast_enough_passes_with_its_evidence() -> None:
    run = assert_speed({"eager": taking(0.02), "compiled": taking(0.01)}, at_least=1.5, options=SIMULATED, name="net")
    (finding,) = run.findings
    assert (finding.check, finding.verdict, finding.subject) == ("speedup", Verdict.PASS, "net")
    assert run.coverage.seen["paired cycles"] > 20
    assert [row[0] for row in run.tables[0].rows] == ["eager", "A/A twin", "compiled"]
    assert run.tables[0].rows[2][2] == pytest.approx(2.0, rel=0.02)


def test_an_arm_that_is_too_slow_fails_the_test() -> None:
    with pytest.raises(AssertionError, match=r"compiled must be at least 1\.5 times as fast as eager"):
        assert_speed({"eager": taking(0.01), "compiled": taking(0.01)}, at_least=1.5, options=SIMULATED)


def test_an_undecided_measurement_raises_nothing() -> None:
    options = SpeedOptions(clock=SimulatedClock(noise=0.3), budget=0.5)
    run = assert_speed({"eager": taking(0.01), "compiled": taking(0.0108)}, options=options)
    assert [finding.verdict for finding in run.findings] == [Verdict.UNDECIDED]


def test_each_arm_may_have_a_limit_of_its_own_and_those_without_are_shown_only() -> None:
    arms = {"eager": taking(0.03), "default": taking(0.02), "max-autotune": taking(0.01)}
    run = assert_speed(arms, at_least={"max-autotune": 2.5}, options=SIMULATED)
    assert [finding.message.split(" must")[0] for finding in run.findings] == ["max-autotune"]
    assert len(run.tables[0].rows) == 4


def never() -> float:
    raise AssertionError("ran")


@pytest.mark.parametrize(
    ("at_least", "found"),
    [({}, "names no arm to judge"), ({"eager": 1.0}, "'eager'"), ({"typo": 1.0}, "'typo'"), ("1.2", "'1.2'")],
)
def test_a_limit_that_judges_nothing_is_refused_before_anything_runs(at_least: object, found: str) -> None:
    with pytest.raises(ampcheck.UsageError, match=found):
        assert_speed({"eager": never, "compiled": never}, at_least=at_least)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arms", "settings", "found"),
    [
        ({"a": never, "b": never}, {"base": "main"}, "base needs a target that fresh processes load"),
        ({"a": never, "b": never}, {"startup": True}, "startup needs a target that fresh processes load"),
        ({"a": never, "b": never}, {"options": SpeedOptions(cold=2)}, "cold has no effect here"),
        ("m.py:f", {}, "pass one of the two; found neither"),
        ("m.py:f", {"base": "main", "startup": True}, "pass one of the two; found both"),
        ("m.py:f", {"base": "main", "at_least": {"a": 1.0}}, "at_least must be a number; found a dict"),
        ("m.py:f", {"base": "main", "options": SpeedOptions(warm=2)}, "warm has no effect here"),
        ("m.py:f", {"startup": True, "at_least": 2.0}, "at_least has no effect on a start"),
        ("m.py:f", {"startup": True, "options": SpeedOptions(effect=0.1)}, "effect has no effect here"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(arms: Any, settings: dict[str, Any], found: str) -> None:
    with pytest.raises(ampcheck.UsageError, match=found):
        assert_speed(arms, **settings)


def test_a_target_is_compared_with_a_base_or_started(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Run(findings=(Finding("regression", Verdict.FAIL, "m", "slower"),))
    calls: list[Any] = []

    def record(*arguments: Any, **settings: Any) -> Run:
        calls.append((arguments, settings))
        return failed

    monkeypatch.setattr(base_judge, "judge_base", record)
    monkeypatch.setattr(startup_judge, "judge_startup", record)
    options, limits = SpeedOptions(mode="default"), StartupLimits(compile=20)
    with pytest.raises(AssertionError, match="slower"):
        assert_speed("m.py:f", base="main", at_least=1.2, options=options)
    for startup in (limits, True):
        with pytest.raises(AssertionError, match="slower"):
            assert_speed("m.py:f", startup=startup, device="cuda", options=options)
    assert calls == [
        (("m.py:f", "main", options), {"at_least": 1.2, "device": "cpu"}),
        (("m.py:f", options), {"limits": limits, "device": "cuda"}),
        (("m.py:f", options), {"limits": None, "device": "cuda"}),
    ]


def test_its_run_is_collected_like_every_other_and_survives_json() -> None:
    with collect() as runs:
        run = assert_speed({"a": taking(0.01), "b": taking(0.01)}, options=SIMULATED)
    assert runs == [run]
    assert ampcheck.Run.from_json(run.to_json()).findings == run.findings


def test_real_steps_are_timed_by_the_real_clock() -> None:
    run = assert_speed(
        {"short": lambda: sum(range(1000)), "long": lambda: sum(range(20_000))},
        at_least=0.001,
        options=SpeedOptions(budget=0.3),
    )
    short, _, long = run.tables[0].rows
    assert short[1] < long[1]  # type: ignore[operator]
