"""The intervals of the verdicts are those of scipy, which a plain installation does not need."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special, stats

from ampcheck.speed.base.stats import student_quantile
from ampcheck.speed.trend.detect import CLIP, huber
from ampcheck.speed.verdict import bootstrapped, median_bounds


@pytest.mark.parametrize("freedom", [1, 3, 5, 7, 15, 31, 199])
@pytest.mark.parametrize("probability", [0.55, 0.9, 0.975, 0.99995, 0.9999999])
def test_students_t(probability: float, freedom: int) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-8)


@pytest.mark.parametrize("confidence", [0.3, 0.9, 0.95, 0.99, 0.99975, 0.9999999])
def test_the_interval_of_the_median(confidence: float) -> None:
    for count in (*range(1, 40), 200, 1500):
        logs = np.random.default_rng(count).normal(size=count)
        expected = stats.quantile_test(logs, q=0, p=0.5).confidence_interval(confidence)
        low, high = median_bounds(logs, confidence)
        assert low == (-math.inf if math.isnan(expected.low) else expected.low)
        assert high == (math.inf if math.isnan(expected.high) else expected.high)


def difference(one: np.ndarray, other: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.median(one, axis=axis) - np.mean(other, axis=axis)


def test_the_bootstrap_of_samples_whose_cycles_correspond() -> None:
    one, other = np.random.default_rng(0).normal(size=(2, 37))
    expected = stats.bootstrap(
        (one, other), difference, paired=True, n_resamples=500, confidence_level=0.95, method="percentile",
        random_state=np.random.default_rng(3),
    ).confidence_interval  # fmt: skip
    assert bootstrapped(difference, one, other, resamples=500, seed=3) == pytest.approx((expected.low, expected.high))


def test_hubers_loss() -> None:
    residuals = np.linspace(0, 3 * CLIP, 50)
    np.testing.assert_allclose(huber(residuals), special.huber(CLIP, residuals))
