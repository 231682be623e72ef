"""What is said of a history: a warning with the commits and versions between which a step lies, never a guess."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from history_records import commit, day, history, record

from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.records.history import History, Note, Point
from ampcheck.report import render_html
from ampcheck.speed.trend.judge import trend_run


def check_trend(history: History, verdict: Verdict = Verdict.WARN) -> tuple[Finding, ...]:
    return trend_run(history, verdict=verdict).findings


def ratios(*parts: tuple[int, float], sd: float = 0.008, seed: int = 0) -> list[float]:
    levels = np.concatenate([np.full(count, math.log(level)) for count, level in parts])
    return list(np.exp(levels + sd * np.random.default_rng(seed).standard_normal(len(levels))))


def test_a_step_down_is_a_warning_with_its_size_commits_and_dates() -> None:
    (finding,) = check_trend(history(ratios((40, 1.3), (10, 1.17))))
    assert (finding.check, finding.verdict, finding.where.phase) == ("regression", Verdict.WARN, "speed")
    assert finding.observed == pytest.approx(-10, abs=1)
    assert (finding.limit, finding.unit) == (-2.0, "%")
    assert f"after {commit(39)[:10]} (2026-02-09), the last good one" in finding.message
    assert f"not later than {commit(40)[:10]} (2026-02-10)" in finding.message
    assert "no version changed there" in finding.message
    assert finding.hint.startswith(f"git log {commit(39)[:10]}..{commit(40)[:10]}; ")
    assert f"--base {commit(39)[:10]}" in finding.hint


def test_a_release_that_came_with_the_step_is_named() -> None:
    points = [
        Point(day(i), record(ratio, torch="2.13.0" if i >= 40 else "2.12.0"), commit(i), False)
        for i, ratio in enumerate(ratios((40, 1.3), (10, 1.17)))
    ]
    (finding,) = check_trend(History.of(points))
    assert "changed there: torch 2.12.0 to 2.13.0" in finding.message


def test_a_slower_step_is_a_failure_where_one_wants_that() -> None:
    assert check_trend(history(ratios((40, 1.3), (10, 1.17))), verdict=Verdict.FAIL)[0].verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (((50, 1.3),), "no step down of 2 % or more in the last 30 points, of 50 points"),
        (((40, 1.17), (10, 1.3)), "the last step, +1"),
        (((30, 1.3), (10, 1.1), (30, 1.3)), "points old and was reversed"),
        (((40, 1.3), (8, 1.1), (5, 1.3)), "points old and was reversed"),
        (((40, 1.3), (40, 1.17)), "is 40 points old"),
    ],
    ids=["steady", "faster", "made good", "made good at once", "long ago"],
)
def test_what_is_steady_faster_made_good_or_long_ago_passes(parts: tuple[tuple[int, float], ...], said: str) -> None:
    (finding,) = check_trend(history(ratios(*parts)))
    assert finding.verdict is Verdict.PASS
    assert said in finding.message


def test_a_series_with_few_points_is_undecided() -> None:
    (finding,) = check_trend(history(ratios((19, 1.3))))
    assert finding.verdict is Verdict.UNDECIDED
    assert (finding.observed, finding.limit) == (19, 20)


def test_a_history_without_points_is_skipped() -> None:
    (finding,) = check_trend(History())
    assert finding.verdict is Verdict.SKIP
    assert "nothing was judged" in finding.message


def test_two_machines_that_differ_make_no_step() -> None:
    values = ratios((60, 1.3))
    points = [
        Point(day(i), record(ratio * (1.2 if i >= 30 else 1), device="cpu (A)" if i < 30 else "cpu (B)"), commit(i))
        for i, ratio in enumerate(values)
    ]
    assert {finding.verdict for finding in check_trend(History.of(points))} == {Verdict.PASS}
    mixed = [replace(point, measured=record(point.value)) for point in points]
    assert not [finding for finding in check_trend(History.of(mixed)) if finding.verdict is Verdict.WARN]  # a step up
    assert trend_run(History.of(mixed)).tables[1].title == "Steps"


def the_run() -> Run:
    values = ratios((30, 1.3), (30, 1.2))
    points = [
        Point(day(i), record(value, torch="2.13.0" if i >= 45 else "2.12.0", platform=f"Linux-6.{i}"), commit(i), False)
        for i, value in enumerate(values)
    ]
    return trend_run(History.of(points, [Note("a.jsonl, line 3", "is damaged; it was left unchanged")]))


def test_the_chart_has_the_ratio_with_its_interval_levels_steps_and_releases() -> None:
    (chart,) = the_run().charts
    line, levels = chart.series
    assert (len(line.y), len(line.low), len(line.high)) == (60, 60, 60)
    assert levels.group == "between steps"
    assert [marker.group for marker in chart.markers] == ["step", "new version"]
    assert chart.markers[0].x == 30.5
    assert chart.markers[1].label == "torch 2.13.0"  # the kernel, which changes with each point here, is no marker
    assert chart.x_label == "measurement (1: 2026-01-01, 60: 2026-03-01)"
    assert chart.y_label == "times faster than eager"


def test_the_run_has_its_tables_says_what_was_not_read_and_survives_json() -> None:
    run = the_run()
    assert [table.title for table in run.tables] == ["Series", "Steps", "Not read"]
    assert run.coverage.seen == {"points": 60, "series": 1}
    assert run.coverage.unseen == {"lines or files that could not be read": 1}
    assert str(Run.from_json(run.to_json()).to_json()) == str(run.to_json())
    page = render_html(run)
    assert "torch 2.13.0" in page
    assert "a.jsonl, line 3" in page


def test_an_interval_without_ends_is_drawn_as_a_gap() -> None:
    points = [Point(day(i), record(1.2, low=0.0, high=math.inf), commit(i)) for i in range(3)]
    run = trend_run(History.of(points))
    assert "svg" in render_html(Run.from_json(run.to_json()))
