"""All arms in turn, in random order, in the same minutes; the reference twice."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
from simulated import SimulatedClock, taking

from ampcheck import UsageError
from ampcheck.records.speed import TWIN
from ampcheck.speed.paired import PairedMeasurement, measure_speed
from ampcheck.speed.verdict import log_ratios


def test_every_cycle_runs_every_arm_equally_often_and_the_order_changes() -> None:
    ran: list[str] = []
    arms = {name: lambda name=name: ran.append(name) or 0.01 for name in ("eager", "compiled", "third")}
    measurement = PairedMeasurement(arms, clock=SimulatedClock(0.0))
    measurement.warm_up()
    ran.clear()
    measurement.run(1.0)
    cycles = [tuple(ran[i : i + 6]) for i in range(0, len(ran), 6)]
    assert all(sorted(cycle) == sorted(2 * list(arms)) for cycle in cycles)
    assert len(set(cycles)) > 5
    assert measurement.stats().cycles == len(cycles)


@pytest.mark.parametrize("seed", range(3))
def test_an_equal_arm_is_no_slower_where_noise_is_skewed(seed: int) -> None:
    """A machine only ever makes a block slower; the median of a mean of two is not the median of one."""

    class Skewed(SimulatedClock):
        def block(self, call: Callable[[], object], calls: int) -> float:
            return super().block(call, calls) * float(np.exp(self.random.exponential(0.3)))

    arms = {"old": taking(0.01), "new": taking(0.01)}
    stats = measure_speed(arms, clock=Skewed(0.0, seed), budget=60, width=None)
    logs = log_ratios(stats.reference, stats.arm("new"))
    assert abs(np.median(logs)) < 4 * 1.25 * np.std(logs) / len(logs) ** 0.5
    assert np.std(log_ratios(stats.reference, stats.twin)) == pytest.approx(np.std(logs), rel=0.2)


def test_a_cache_that_holds_one_arm_favours_none() -> None:
    """A call is slower where another arm ran before it; the reference must not find its data there more often."""
    last: list[str] = []

    def cached(name: str) -> Callable[[], float]:
        def step() -> float:
            seconds = 0.001 if last == [name] else 0.0011
            last[:] = [name]
            return seconds

        return step

    arms = {"old": cached("old"), "new": cached("new")}
    stats = measure_speed(arms, clock=SimulatedClock(0.001), budget=5, width=None, block=0.0001)
    assert abs(np.mean(log_ratios(stats.reference, stats.arm("new")))) < 0.005


def test_the_reference_stands_first_and_its_twin_second() -> None:
    stats = measure_speed({"a": taking(0.01), "b": taking(0.02)}, clock=SimulatedClock(), budget=1)
    assert [arm.name for arm in stats.arms] == ["a", TWIN, "b"]
    assert stats.reference.median == pytest.approx(stats.twin.median, rel=0.05)
    assert [arm.name for arm in stats.compared] == ["b"]


def test_a_block_holds_as_many_calls_as_fill_it_and_a_time_is_of_one_call() -> None:
    stats = measure_speed({"a": taking(1e-4), "b": taking(0.05)}, clock=SimulatedClock(0.0), budget=1, block=0.001)
    assert (stats.arm("a").calls, stats.arm("b").calls) == (10, 1)
    assert stats.arm("a").median == pytest.approx(1e-4)
    assert stats.arm("b").median == pytest.approx(0.05)


def test_the_first_call_which_compiles_is_kept_apart_and_in_no_time() -> None:
    def compiling() -> float:
        seconds, compiling.cost = compiling.cost, 0.01  # type: ignore[attr-defined]
        return seconds

    compiling.cost = 30.0  # type: ignore[attr-defined]
    stats = measure_speed({"eager": taking(0.02), "compiled": compiling}, clock=SimulatedClock(0.0), budget=1)
    assert stats.arm("compiled").first == pytest.approx(30.0)
    assert max(stats.arm("compiled").seconds) == pytest.approx(0.01)


def test_it_stops_when_the_interval_is_narrow_enough() -> None:
    quiet = measure_speed({"a": taking(0.01), "b": taking(0.01)}, clock=SimulatedClock(0.001), budget=8)
    noisy = measure_speed({"a": taking(0.01), "b": taking(0.01)}, clock=SimulatedClock(0.5), budget=8)
    assert quiet.stopped == "narrow"
    assert noisy.stopped == "budget"
    assert quiet.spent < noisy.spent
    assert noisy.spent == pytest.approx(8, rel=0.1)


def test_a_budget_shorter_than_one_cycle_still_gives_one_cycle_a_look() -> None:
    stats = measure_speed({"a": taking(5.0), "b": taking(5.0)}, clock=SimulatedClock(), budget=0.1)
    assert stats.cycles >= 1


def test_pythons_collector_waits_for_the_end_of_a_cycle_and_runs_again() -> None:
    seen: list[bool] = []
    measurement = PairedMeasurement(
        {"a": lambda: seen.append(gc.isenabled()) or 0.01, "b": taking(0.01)}, clock=SimulatedClock()
    )
    measurement.run(0.2)
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_an_arm_that_raises_is_named_and_the_collector_runs_again() -> None:
    def broken() -> float:
        raise ValueError("shapes do not match")

    measurement = PairedMeasurement({"eager": taking(0.01), "compiled": broken}, clock=SimulatedClock(), subject="net")
    with pytest.raises(UsageError, match="arm 'compiled' of net raised ValueError: shapes do not match"):
        measurement.run(0.1)
    assert gc.isenabled()
    assert measurement.stats().cycles == 0


@pytest.mark.parametrize(
    ("arms", "found"),
    [
        ({"alone": taking(1.0)}, "found 1"),
        ([taking(1.0), taking(1.0)], "found list"),
        ({"a": taking(1.0), TWIN: taking(1.0)}, "A/A twin"),
        ({"a": taking(1.0), "b": 3}, "'b' is a callable without arguments; found int"),
    ],
)
def test_arms_that_cannot_be_compared_are_refused_in_a_sentence(arms: object, found: str) -> None:
    with pytest.raises(UsageError, match=found):
        measure_speed(arms)  # type: ignore[arg-type]


def test_long_steps_do_not_overrun_the_budget_by_more_than_one_cycle() -> None:
    stats = measure_speed({"a": taking(2.0), "b": taking(2.0)}, clock=SimulatedClock(0.0), budget=10, width=None)
    assert stats.cycles == 2  # 8 s each


@pytest.mark.parametrize("budget", [0, -1.0, float("nan"), float("inf"), "3"])
def test_a_budget_is_seconds_above_zero(budget: float) -> None:
    with pytest.raises(UsageError, match="budget must be a"):
        measure_speed({"a": taking(1.0), "b": taking(1.0)}, budget=budget)


def test_speed_on_a_device_that_is_not_there_is_refused_and_never_emulated() -> None:
    with pytest.raises(UsageError, match="'xpu:7' is not there"):
        measure_speed({"a": taking(1.0), "b": taking(1.0)}, device="xpu:7")
