"""The intervals hold what they promise, for every distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.records.speed import ArmTimes, Ratio
from ampcheck.speed.verdict import cycles_needed, median_bounds, paired_ratio

floats = st.floats(-1, 1, allow_nan=False)


def ratio_of(logs: np.ndarray) -> Ratio:
    return paired_ratio(ArmTimes("one", tuple(np.exp(logs).tolist())), ArmTimes("other", (1.0,) * len(logs)))


@given(st.lists(floats, min_size=1, max_size=60))
def test_the_median_lies_within_its_intervals(values: list[float]) -> None:
    logs = np.array(values)
    ratio = ratio_of(logs)
    assert ratio.low <= ratio.median <= ratio.high or len(values) == 1
    low, high = median_bounds(logs, 0.9)
    assert low <= np.median(logs) <= high
    assert ratio.minimum <= ratio.p05 <= ratio.median


@given(st.lists(floats, min_size=2, max_size=40))
def test_the_ratio_is_turned_round_when_the_arms_change_places(values: list[float]) -> None:
    one = ArmTimes("one", tuple(math.exp(value) for value in values))
    other = ArmTimes("other", (1.0,) * len(values))
    there, back = paired_ratio(one, other), paired_ratio(other, one)
    assert there.median == pytest.approx(1 / back.median)


@pytest.mark.parametrize(
    ("family", "confidence"),
    [(family, confidence) for family in ("normal", "cauchy", "skewed") for confidence in (0.9, 0.99, 0.99975)],
)
def test_the_exact_interval_misses_the_true_median_no_more_often_than_it_says(family: str, confidence: float) -> None:
    random = np.random.default_rng(0)
    draw = {
        "normal": lambda size: random.normal(size=size),
        "cauchy": lambda size: random.standard_cauchy(size=size),
        "skewed": lambda size: random.exponential(size=size) - math.log(2),
    }[family]
    trials = 1500
    bounds = [median_bounds(draw(40), confidence) for _ in range(trials)]
    missed = sum(not low <= 0 <= high for low, high in bounds)
    allowed = (1 - confidence) * trials
    assert missed <= allowed + 4 * math.sqrt(allowed) + 1


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.999, 0.99975])
def test_there_is_no_interval_below_the_number_of_cycles_that_it_needs_and_one_from_there(confidence: float) -> None:
    needed = cycles_needed(confidence)
    logs = np.linspace(-1, 1, needed)
    assert np.isfinite(median_bounds(logs, confidence)).all()
    assert not np.isfinite(median_bounds(logs[:-1], confidence)).any()


def test_an_outlier_does_not_move_the_ratio() -> None:
    logs = np.full(21, 0.1)
    logs[0] = -5.0
    assert ratio_of(logs).median == pytest.approx(math.exp(0.1))
    assert ratio_of(logs).minimum == pytest.approx(math.exp(-5.0))


def test_the_bootstrap_is_the_same_for_the_same_data() -> None:
    logs = np.random.default_rng(0).normal(size=50)
    assert ratio_of(logs) == ratio_of(logs)
