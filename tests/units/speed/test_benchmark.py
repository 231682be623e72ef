"""A speed test without pytest: measurement, verdicts and records."""

from __future__ import annotations

import re
from typing import Any

import pytest
from simulated import SimulatedClock, taking

from ampcheck import UsageError, Verdict
from ampcheck.records.speed import Rule
from ampcheck.report.charts import draw_chart
from ampcheck.speed.benchmark import SpeedTestOptions, judge_benchmark, measure_benchmark, skip_benchmark

ARMS = {"eager": taking(0.02), "compiled": taking(0.01), "autotuned": taking(0.008)}


def options(**arguments: Any) -> SpeedTestOptions:
    return SpeedTestOptions.of({"clock": SimulatedClock(), "budget": 2.0}, arguments)


def test_each_judged_arm_has_a_verdict_and_a_record_of_it() -> None:
    found = judge_benchmark(ARMS, options(at_least=1.5, precision="bfloat16"), name="t.py::test_a")
    assert [finding.verdict for finding in found.run.findings] == [Verdict.PASS, Verdict.PASS]
    assert [(one.arm, one.name, one.verdict, one.precision) for one in found.records] == [
        ("compiled", "t.py::test_a", "pass", "bfloat16"),
        ("autotuned", "t.py::test_a", "pass", "bfloat16"),
    ]
    assert found.records[0].ratio == pytest.approx(2.0, rel=0.03)
    assert found.records[0].fingerprint == found.stats.fingerprint


@pytest.mark.parametrize(("tests", "at_least"), [(1, 1.5), (20, 1.5), (20, {"compiled": 1.5})])
def test_the_confidence_pays_for_all_tests_of_the_session_and_the_arms_of_this_one(tests: int, at_least: Any) -> None:
    found = judge_benchmark(ARMS, options(at_least=at_least), name="t", tests=tests)
    arms = 1 if isinstance(at_least, dict) else 2
    assert f"{100 * Rule(comparisons=tests * arms).confidence:.4g} % confidence" in found.run.findings[0].message
    assert f"{tests * arms} comparisons: {tests} speed tests in the session, {arms} judged" in found.run.tables[0].note


def test_a_number_of_comparisons_that_is_asked_for_counts_alone() -> None:
    found = judge_benchmark(ARMS, options(comparisons=7), name="t", tests=20)
    assert f"{100 * Rule(comparisons=7).confidence:.4g} % confidence" in found.run.findings[0].message


def test_the_chart_of_times_has_milliseconds_on_its_axis_and_no_powers_of_two() -> None:
    (chart,) = judge_benchmark(ARMS, options(), name="t").run.charts
    picture = draw_chart(chart)
    assert {"10", "20"} <= set(re.findall(r">([\d.,]+)</text>", picture)), picture  # ms of the arms
    assert not re.search(r">2[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+<", picture)


def test_without_a_verdict_every_arm_is_kept_and_none_is_judged() -> None:
    found = measure_benchmark(ARMS, options(), name="t")
    assert found.run.findings == ()
    assert [(one.arm, one.verdict) for one in found.records] == [("compiled", ""), ("autotuned", "")]


@pytest.mark.parametrize(("judged", "said"), [(True, "must be at least 1.5 times as fast as"), (False, "is compared")])
def test_where_nothing_is_measured_each_arm_is_called_once_and_skipped(judged: bool, said: str) -> None:
    called = []
    arms = {name: (lambda name=name: called.append(name)) for name in ARMS}
    run = skip_benchmark(arms, options(at_least=1.5), name="t", reason="it is Sunday", judged=judged)
    assert called == list(ARMS)
    assert [finding.verdict for finding in run.findings] == [Verdict.SKIP, Verdict.SKIP]
    assert all("it is Sunday" in finding.message and said in finding.message for finding in run.findings)
    assert run.coverage.unseen == {"it is Sunday": 2}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"atleast": 1.2}, "takes no 'atleast'"),
        ({"budget": 0}, "budget must be a finite number above 0; found 0"),
        ({"effect": "3 %"}, "effect must be a number; found '3 %'"),
        ({"budget": float("inf")}, "budget must be a finite number above 0; found inf"),
        ({"width": "narrow"}, "width must be a number; found 'narrow'"),
        ({"comparisons": "3"}, "comparisons must be a whole number, 1 or more; found '3'"),
        ({"comparisons": 0}, "comparisons must be a whole number, 1 or more; found 0"),
        ({"seed": "x"}, "seed must be a whole number; found 'x'"),
        ({"precision": "half"}, "precision must be one of float32, tf32, float16, bfloat16"),
        ({"at_least": {"compild": 1.2}}, "at_least names 'compild', which is no arm after the reference"),
        ({"at_least": {"eager": 1.2}}, "at_least names 'eager', which is no arm after the reference"),
        ({"at_least": {}}, "at_least names no arm to judge"),
        ({"at_least": "1.2"}, "at_least must be a number; found '1.2'"),
        ({"at_least": -1.0}, "at_least must be a finite number above 0; found -1.0"),
    ],
)
def test_what_it_cannot_take_is_told_before_anything_runs(given: dict[str, Any], told: str) -> None:
    ran = []
    arms = {name: (lambda: ran.append(1)) for name in ARMS}
    with pytest.raises(UsageError, match=told):
        judge_benchmark(arms, options(**given), name="t")
    assert not ran


@pytest.mark.parametrize("arms", [{"eager": taking(1)}, {}, None, [taking(1)], {"eager": taking(1), "compiled": 3}])
def test_arms_that_are_none_are_told_where_nothing_is_measured_too(arms: Any) -> None:
    with pytest.raises(UsageError, match=r"two or more arms|callable without arguments"):
        skip_benchmark(arms, options(), name="t", reason="it is Sunday")
