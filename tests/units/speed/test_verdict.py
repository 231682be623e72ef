"""A verdict needs evidence: the interval and the minimum effect agree, or nothing is decided."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from simulated import SimulatedClock, taking

from ampcheck import UsageError, Verdict
from ampcheck.records.speed import TWIN, ArmTimes, Rule, SpeedRecord, SpeedStats
from ampcheck.speed.paired import PairedMeasurement
from ampcheck.speed.verdict import aa_noise, check_speed, decide, is_decided, record_of


def stats_of(ratio: float, *, noise: float = 0.01, twin: float = 1.0, cycles: int = 100, **more: object) -> SpeedStats:
    """Times of `base`, its twin and `head`, which is `ratio` times as fast."""
    random = np.random.default_rng(0)

    def times(seconds: float) -> tuple[float, ...]:
        return tuple(seconds * np.exp(noise * random.normal(size=cycles)))

    arms = (ArmTimes("base", times(1.0)), ArmTimes(TWIN, times(1 / twin)), ArmTimes("head", times(1 / ratio)))
    return SpeedStats("model", arms, **more)  # type: ignore[arg-type]


def verdict_of(ratio: float, rule: Rule | None = None, **more: float) -> Verdict:
    (finding,) = check_speed(stats_of(ratio, **more), rule or Rule())  # type: ignore[arg-type]
    return finding.verdict


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(1.2, Verdict.PASS), (1.0, Verdict.PASS), (0.99, Verdict.PASS), (0.94, Verdict.FAIL), (0.5, Verdict.FAIL)],
)
def test_no_slower_than_base_is_judged_by_the_paired_ratio(ratio: float, verdict: Verdict) -> None:
    assert verdict_of(ratio) is verdict


@pytest.mark.parametrize(("ratio", "verdict"), [(1.4, Verdict.PASS), (1.19, Verdict.PASS), (1.1, Verdict.FAIL)])
def test_a_speedup_must_reach_its_limit_short_of_the_minimum_effect(ratio: float, verdict: Verdict) -> None:
    assert verdict_of(ratio, Rule(limit=1.2)) is verdict


def test_a_shortfall_that_is_certain_but_below_the_minimum_effect_fails_nothing() -> None:
    assert verdict_of(0.98, noise=0.0001) is Verdict.PASS


def test_a_shortfall_that_is_large_but_uncertain_decides_nothing() -> None:
    assert verdict_of(0.93, noise=0.05, cycles=20) is Verdict.UNDECIDED


def test_too_few_cycles_decide_nothing_and_say_how_many_are_needed() -> None:
    (finding,) = check_speed(stats_of(0.5, cycles=5))
    assert finding.verdict is Verdict.UNDECIDED
    assert "5 cycles are too few" in finding.message
    assert "budget" in finding.hint


@pytest.mark.parametrize("ratio", [0.95, 1.0, 1.05])
def test_a_twin_that_differs_from_the_reference_makes_what_differs_no_more_not_comparable(ratio: float) -> None:
    (finding,) = check_speed(stats_of(ratio, twin=0.9))
    assert finding.verdict is Verdict.UNDECIDED
    assert finding.message.startswith("not comparable: base and its own twin differ by up to")


@pytest.mark.parametrize(("ratio", "verdict"), [(0.5, Verdict.FAIL), (2.0, Verdict.PASS)])
def test_what_stands_clear_of_the_noise_is_judged_all_the_same(ratio: float, verdict: Verdict) -> None:
    assert verdict_of(ratio, twin=0.9) is verdict


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(1.5, Verdict.UNDECIDED), (2.0, Verdict.UNDECIDED), (6.0, Verdict.PASS)]
)
def test_a_pass_is_clear_of_the_noise_that_its_report_shows(ratio: float, verdict: Verdict) -> None:
    twin = math.log(4) * np.linspace(-1, 1, 12)  # of two runs of one code, one takes up to four times as long
    assert aa_noise(twin) > 1.3
    assert decide(np.full(12, math.log(ratio)), twin, Rule()).verdict is verdict


def test_a_pass_beside_noise_says_that_it_is_clear_of_it() -> None:
    (finding,) = check_speed(stats_of(2.0, twin=0.9))
    assert finding.verdict is Verdict.PASS
    assert "clear of the noise of 10 % between base and its twin" in finding.message
    (finding,) = check_speed(stats_of(2.0))
    assert "noise" not in finding.message


def test_a_finding_says_requirement_observation_interval_and_confidence() -> None:
    (finding,) = check_speed(stats_of(0.9))
    assert finding.check == "speedup"
    assert finding.verdict is Verdict.FAIL
    assert "head must be no slower than base" in finding.message
    assert "0.9" in finding.message
    assert "99.5 % confidence" in finding.message
    assert "100 paired cycles" in finding.message
    assert finding.observed == pytest.approx(0.9, abs=0.01)
    assert finding.limit == 1.0
    assert finding.where.phase == "speed"


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": 0},
        {"limit": "1.2"},
        {"effect": "a"},
        {"comparisons": "3"},
        {"limit": math.inf},
        {"effect": 0},
        {"effect": 1},
        {"comparisons": 0},
        {"false_alarms": 0},
    ],
)
def test_a_rule_that_means_nothing_is_refused_in_a_sentence(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="found"):
        Rule(**wrong)  # type: ignore[arg-type]


def test_a_rule_for_an_arm_that_did_not_run_is_refused() -> None:
    with pytest.raises(UsageError, match="no arm 'compiled'; there are base"):
        check_speed(stats_of(1.0), {"compiled": Rule()})


@pytest.mark.parametrize("rules", [{}, {"base": Rule()}, {TWIN: Rule()}])
def test_rules_that_judge_nothing_or_the_reference_itself_are_refused(rules: dict[str, Rule]) -> None:
    with pytest.raises(UsageError, match="at least one arm other than the reference"):
        check_speed(stats_of(1.0), rules)


def test_the_more_comparisons_a_suite_makes_the_surer_each_must_be() -> None:
    assert Rule().confidence < Rule(comparisons=20).confidence < Rule(comparisons=1000).confidence < 1


def gate(ratio: float, seed: int, noise: float, rule: Rule, tails: float | None = None) -> Verdict:
    """A gate as a user runs it: looked at as it grows, ended when it is decided."""
    clock = SimulatedClock(noise, seed, tails)
    steps = {"base": taking(0.01), "head": taking(0.01 / ratio)}
    measurement = PairedMeasurement(steps, clock=clock, seed=seed)
    measurement.warm_up()
    for until in (0.3, 0.6, 1.2, 2.4):
        measurement.run(until)
        if is_decided(measurement.stats(), rule):
            break
    (finding,) = check_speed(measurement.stats(), rule)
    return finding.verdict


@pytest.mark.parametrize("tails", [None, 2.0])
def test_noise_never_fails_a_build(tails: float | None) -> None:
    rule = Rule(comparisons=20)
    verdicts = [gate(1.0, seed, 0.05, rule, tails) for seed in range(60)]
    assert Verdict.FAIL not in verdicts


def test_a_slowdown_of_a_tenth_is_found() -> None:
    verdicts = [gate(1 / 1.1, seed, 0.02, Rule(comparisons=20)) for seed in range(20)]
    assert verdicts.count(Verdict.FAIL) == len(verdicts)


def test_what_is_kept_of_an_arm_survives_the_way_through_json() -> None:
    record = record_of(stats_of(1.3, fingerprint={"threads": 2}), "head", name="bench", verdict="pass")
    assert SpeedRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record
    assert record.low <= record.ratio <= record.high


def test_an_interval_without_an_end_is_kept_as_strict_json() -> None:
    record = record_of(stats_of(1.3, cycles=1), "head", name="bench")
    assert math.isinf(record.high)
    assert SpeedRecord.from_dict(json.loads(json.dumps(record.to_dict(), allow_nan=False))) == record


@pytest.mark.parametrize("damage", [{"schema": 99}, {"ratio": "fast"}, {"cycles": True}, {"fingerprint": 3}])
def test_a_damaged_or_newer_record_is_refused_in_a_sentence(damage: dict[str, object]) -> None:
    data = record_of(stats_of(1.3), "head", name="bench").to_dict()
    with pytest.raises(UsageError):
        SpeedRecord.from_dict({**data, **damage})


def test_decide_needs_both_the_interval_and_the_effect() -> None:
    logs, twin = np.full(50, math.log(0.96)), np.zeros(50)
    assert decide(logs, twin, Rule(effect=0.03)).verdict is Verdict.FAIL
    assert decide(logs, twin, Rule(effect=0.05)).verdict is Verdict.PASS
