"""What benchmarks/bench_trend.py says of its own figures: how many series, by which criterion, and what was kept."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampcheck.speed.trend.detect import LEAST, WINDOW, alarms


@pytest.fixture(scope="module")
def bench() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
        yield importlib.import_module("bench_trend")
        for name in ("bench_trend", "trend_heights", "trend_bound"):
            sys.modules.pop(name, None)


def of_libraries(bench: Any, asked: list[int]) -> Any:
    """Libraries that tell a step 20 points before the end of each series."""

    def ask(logs: Any) -> dict[str, Any]:
        asked.append(len(logs))
        return {name: np.full((len(logs), 1), logs.shape[1] - 20) for name in bench.LIBRARIES}

    return ask


def test_the_report_counts_the_series_that_each_of_them_saw(bench: Any) -> None:
    asked: list[int] = []
    data = bench.measured(bench.PARTS[:4], 40, of_libraries(bench, asked), {})
    assert set(asked) == {20, 2 * 41, 40}  # of 40 series half once, a twentieth each day, all of them with a step
    text = "\n".join(bench.report(data))
    assert "40 series of each family, after every point; the libraries at the first 20 of them, once" in text
    assert "and at the first 2 every day from the 20th on" in text
    assert "asked once with five points after the step, of the first 40 series, by the same criterion" in text
    assert "Of 40 steps of 5 %" in text


def test_a_step_in_another_place_is_not_found_by_the_detector_either(bench: Any) -> None:
    logs = bench.with_step(np.random.default_rng(0), 4, 40, 0.003, 10)
    assert np.isfinite(bench.found_at(logs, 40)).all()
    assert not np.isfinite(bench.found_at(logs, 35)).any(), "told where it is, 5 points beside the place asked for"
    assert (bench.first_detected(logs, 35) > 0).all()


def test_what_is_not_measured_again_is_kept_and_so_is_what_the_libraries_said(bench: Any) -> None:
    before = bench.measured(bench.PARTS[:4], 40, of_libraries(bench, []), {})
    again = bench.measured(["power"], 40, lambda _: {}, before)
    assert again["false alarms"] == before["false alarms"]
    assert [bench.LIBRARIES[0] + ", 5 points" in row for row in again["power"]] == [
        row["before"] == 40 and row["sd"] in (0.01, 0.015) for row in again["power"]
    ]
    assert again["power"] == before["power"]
    assert again["kept"]["parts"] == ["false alarms", "keyed", "places"]
    assert "as the series are the same: false alarms, keyed, places, what the libraries said." in "\n".join(
        bench.report(again)
    )


def test_the_simulation_of_the_heights_is_the_detectors_own_without_a_minimum_effect(bench: Any) -> None:
    heights = sys.modules["trend_heights"]
    logs = np.concatenate(list(heights.shapes(np.random.default_rng(5), 30).values()))
    logs[:8, 30:] += 8.0  # some are told
    alone, guarded = heights._exceeding(logs)
    told = np.zeros(len(logs), dtype=bool)
    for end in range(LEAST, 61):
        told |= alarms(logs[:, max(0, end - WINDOW) : end], effect=0.0) > 0
    assert told.sum() >= 5
    assert not (told & ~guarded).any()
    assert not (guarded & ~alone).any()
    assert (guarded & ~told).sum() <= 1, "a step against the sign of its medians is none"
    assert len(heights.shapes(np.random.default_rng(0), 1)) == 11
    assert math.isclose(heights.heights(20, 1)[0]["series"], 20)


def test_a_detector_that_knows_more_finds_more_and_none_beats_the_bound(bench: Any) -> None:
    bound = sys.modules["trend_bound"]
    rows = bound.bounds(600, 1)
    for row in rows:
        powers = [row[name][0] for name in bound.DETECTORS]
        assert powers == sorted(powers, reverse=True)
        assert row["ampcheck"][1] < row["at most"]
        assert row["at most"] > row["normal noise"][1]
        assert all(low <= share <= high for share, low, high in (row[name] for name in bound.DETECTORS))
    assert "| before |" in "\n".join(bound.bounds_text(rows))
