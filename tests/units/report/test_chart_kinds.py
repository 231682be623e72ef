"""Histograms, and the axes of line charts: what they show, and that no number and no name is at a loss."""

from __future__ import annotations

import math
import re

import pytest
from sample_run import parsed, texts

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Band, Chart, Run, Series
from ampcheck.report.charts import describe_chart, draw_chart

FLOAT16 = (Band("float16 subnormal", -24, -14), Band("float16 normal", -14, 16))


def histogram(*series: Series, scale: str = "exponent") -> Chart:
    return Chart("histogram", "t", "magnitude", "count", series=series, bands=FLOAT16, scale=scale)


def test_a_histogram_names_its_series_axes_and_the_ranges_of_the_formats() -> None:
    words = set(texts(draw_chart(histogram(Series("plain", (-3, -2, -1), (5, 7)), Series("scaled", (10, 11), (12,))))))
    assert {"plain", "scaled", "magnitude", "count"} <= words
    assert any(word.startswith("float16 subnormal") for word in words)
    assert "2⁻²⁴" in words


def test_the_height_of_a_bar_is_its_count() -> None:
    drawing = parsed(draw_chart(histogram(Series("plain", (0, 1, 2), (10, 5)))))
    outline = next(path.get("d") or "" for path in drawing.iter("path") if path.get("class") == "c0")
    heights = sorted({float(y) for y in re.findall(r"(?:V|M[-\d.]+ )([-\d.]+)", outline)})
    low, middle, high = heights  # from the top: 10, 5 and 0
    assert (high - low) == pytest.approx(2 * (high - middle), rel=2e-3)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ((), ()),
        ((1,), ()),
        ((1, 2), (math.nan,)),
        ((0, 1), (0,)),
    ],
)
def test_a_histogram_of_any_numbers_is_drawn(x: tuple[float, ...], y: tuple[float, ...]) -> None:
    for scale in ("exponent", "linear"):
        parsed(draw_chart(histogram(Series("a", x, y), scale=scale)))


@pytest.mark.parametrize(("x", "y"), [((2, 1), (3,)), ((1, math.inf), (3,)), ((1, 2, 3), (1,))])
def test_a_histogram_with_impossible_edges_is_a_usage_error(x: tuple[float, ...], y: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="the series 'a' must have"):
        histogram(Series("a", x, y))


def test_a_histogram_without_series_is_drawn_and_described() -> None:
    parsed(draw_chart(Chart("histogram", "t", "x")))
    told = describe_chart(histogram(Series("plain", (0, 1, 2), (10, 5))))
    assert told.startswith("Histogram chart of 1 series; magnitude from 0 to 2")


def test_axes_of_exponents_are_labelled_with_powers_of_two() -> None:
    chart = Chart("line", "t", "x", "y", (Series("a", (-4, 0, 4), (-8, 0, 8)),), x_scale="exponent", y_scale="exponent")
    assert {"2⁻⁴", "2⁰", "2⁴", "2⁸"} <= set(texts(draw_chart(chart)))


def test_a_logarithmic_axis_is_one_when_it_is_asked_for_and_none_when_it_is_not() -> None:
    wide = Series("a", (1, 10, 1000), (1, 10, 1e6))
    assert {"1", "100"} <= set(texts(draw_chart(Chart("line", "t", "x", "y", (wide,), x_scale="log"))))
    assert "100" not in texts(draw_chart(Chart("line", "t", "x", "y", (wide,), y_scale="linear")))


@pytest.mark.parametrize("axis", ["x_scale", "y_scale"])
def test_an_unknown_scale_of_an_axis_is_told(axis: str) -> None:
    with pytest.raises(UsageError, match=f"{axis} of a chart must be empty or linear or log or exponent, not 'cubic'"):
        draw_chart(Chart("line", "t", "x", **{axis: "cubic"}))


@pytest.mark.parametrize("scale", ["linear", "log", "exponent"])
@pytest.mark.parametrize("y", [(), (0.0,), (-1.0, 1.0), (math.nan, math.inf)])
def test_a_line_of_any_numbers_is_drawn_on_any_axis(scale: str, y: tuple[float, ...]) -> None:
    x = tuple(float(number) for number in range(len(y)))
    parsed(draw_chart(Chart("line", "t", "x", "y", (Series("a", x, y),), x_scale=scale, y_scale=scale)))


def test_charts_kept_before_there_were_axes_are_read() -> None:
    data = Run(charts=(Chart("line", "t", "x"),)).to_json()
    del data["charts"][0]["x_scale"], data["charts"][0]["y_scale"]
    assert Run.from_json(data).charts[0].x_scale == ""
