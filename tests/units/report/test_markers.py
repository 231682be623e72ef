"""Lines with a band around them, and markers: drawn, described, and unknown to runs of before."""

from __future__ import annotations

import json
import math

import pytest
from sample_run import parsed, texts

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Chart, Marker, Run, Series
from ampcheck.report.charts import describe_chart, draw_chart

BANDED = Series("ratio", (1, 2, 3), (1.0, 1.1, 1.2), low=(0.9, 1.0, 1.1), high=(1.1, 1.2, 1.3))
MARKERS = (
    Marker("-5 %, abc", 1.5, "step"),
    Marker("torch 2.13", 2.5, "new version"),
    Marker("torch 2.14", 2.7, "new version"),
)
CHART = Chart("line", "history", "measurement", "times faster", (BANDED,), markers=MARKERS)


def test_a_marker_stands_with_its_name_and_each_group_once_in_the_legend() -> None:
    words = texts(draw_chart(CHART))
    assert {"-5 %, abc", "torch 2.13", "torch 2.14"} <= set(words)
    assert words.count("step") == 1
    assert words.count("new version") == 1


def test_a_band_is_drawn_and_follows_the_interval() -> None:
    plain = Series("ratio", BANDED.x, BANDED.y)
    drawn, bare = (draw_chart(Chart("line", "t", "x", series=(one,))) for one in (BANDED, plain))
    assert drawn.count("<path") > bare.count("<path")


def test_the_description_names_the_markers() -> None:
    assert "step -5 %, abc at 1.5; new version torch 2.13 at 2.5" in describe_chart(CHART)


@pytest.mark.parametrize("edge", [math.nan, math.inf, -math.inf, 1e308])
def test_bands_and_markers_of_any_number_are_drawn(edge: float) -> None:
    series = Series("a", (1, 2, 3), (1, 2, 3), low=(edge, 1, 2), high=(2, edge, 4))
    chart = Chart("line", "t", "x", series=(series,), markers=(Marker("", edge), Marker("b", 2, "g")))
    parsed(draw_chart(chart))


@pytest.mark.parametrize("low", [(1.0,), (1.0, 1.0, 1.0, 1.0)])
def test_a_band_of_another_length_is_a_usage_error(low: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="as many y, low and high as x"):
        Chart("line", "t", "x", series=(Series("a", (1, 2), (1, 2), low=low, high=low),))


def test_markers_on_an_empty_or_logarithmic_chart_are_drawn() -> None:
    parsed(draw_chart(Chart("line", "t", "x", markers=MARKERS)))
    wide = Series("a", (1, 2, 3), (1, 10, 1e6))
    parsed(draw_chart(Chart("line", "t", "x", series=(wide,), markers=MARKERS)))


def test_bands_and_markers_survive_json() -> None:
    run = Run(charts=(CHART,))
    assert Run.from_json(json.loads(json.dumps(run.to_json()))) == run


def test_a_run_from_before_bands_and_markers_is_read() -> None:
    data = Run(charts=(CHART,)).to_json()
    (chart,) = data["charts"]
    del chart["markers"]
    for series in chart["series"]:
        del series["low"], series["high"]
    (read,) = Run.from_json(data).charts
    assert read.markers == ()
    assert read.series[0].low == ()


@pytest.mark.parametrize("bad", [{"markers": 3}, {"markers": [{"label": "a"}]}, {"markers": [{"label": 1, "x": 2}]}])
def test_damaged_markers_are_a_usage_error(bad: dict[str, object]) -> None:
    data = Run(charts=(CHART,)).to_json()
    data["charts"][0].update(bad)
    with pytest.raises(UsageError, match="is damaged"):
        Run.from_json(data)
