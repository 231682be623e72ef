"""Line charts: a label keeps its colour and a group its dashes, every line shows, and an axis has labels."""

from __future__ import annotations

import pytest

from ampcheck.core.run import Chart, Series
from ampcheck.report.charts import draw_line


def lines(*series: Series, y_scale: str = "linear", x_scale: str = "") -> dict:
    figure = draw_line(Chart("line", "a", "x", "y", series=series, y_scale=y_scale, x_scale=x_scale))
    figure.draw_without_rendering()
    return {line.get_label(): line for line in figure.axes[0].get_lines()} | {"axes": figure.axes[0]}


def test_what_has_no_group_is_solid_whichever_comes_first() -> None:
    plain, other = Series("a", (0.0, 1.0), (0.0, 1.0)), Series("a", (0.0, 1.0), (1.0, 0.0), group="compiled")
    for order in ((plain, other), (other, plain)):
        seen = lines(*order)
        assert seen["a"].get_linestyle() == "-"
        assert seen["a compiled"].get_linestyle() == "--"


def test_a_label_keeps_its_colour_over_its_groups() -> None:
    place = (0.0, 1.0)
    seen = lines(
        Series("a", place, (0.0, 1.0)),
        Series("a", place, (1.0, 0.0), group="compiled"),
        Series("b", place, (2.0, 0.0)),
    )
    assert seen["a"].get_color() == seen["a compiled"].get_color() != seen["b"].get_color()


def test_a_line_that_another_lies_on_is_drawn_wider_and_one_that_shows_is_not() -> None:
    place = (0.0, 1.0)
    seen = lines(Series("a", place, (0.0, 1.0)), Series("b", place, (0.0, 1.0)), Series("c", place, (0.0, 0.5)))
    width = {name: seen[name].get_linewidth() for name in "abc"}
    assert width["a"] > width["b"] == width["c"]


@pytest.mark.parametrize("values", [(2e-4, 7e-4), (1.1e-3, 1.3e-3), (0.4, 4.0), (1e-6, 1.0)])
def test_a_logarithmic_axis_has_at_least_two_labels(values: tuple[float, float]) -> None:
    axes = lines(Series("a", values, values), y_scale="log", x_scale="log")["axes"]
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        told = [tick.label1.get_text() for tick in ticks if low <= tick.get_loc() <= high]
        assert len({label for label in told if label}) >= 2
