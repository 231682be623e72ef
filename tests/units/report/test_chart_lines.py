"""Line charts: a label keeps its colour and a group its dashes, every line shows, and an axis has labels."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element

import pytest
from sample_run import parsed

from ampcheck.core.run import Chart, Series
from ampcheck.report.charts import draw_chart


def lines(*series: Series, y_scale: str = "linear", x_scale: str = "") -> tuple[dict[str, str], list[Element]]:
    """The styles of lines by their names in the legend, and their paths in order."""
    drawing = parsed(draw_chart(Chart("line", "a", "x", "y", series=series, y_scale=y_scale, x_scale=x_scale)))
    legend = list(drawing.iter("li"))
    names = ["".join(item.itertext()) for item in legend]
    styles = [next(item.iter("line")).get("class") or "" for item in legend]
    return dict(zip(names, styles, strict=True)), [p for p in drawing.iter("path") if "area" not in str(p.get("class"))]


def test_what_has_no_group_is_solid_whichever_comes_first() -> None:
    plain, other = Series("a", (0.0, 1.0), (0.0, 1.0)), Series("a", (0.0, 1.0), (1.0, 0.0), group="compiled")
    for order in ((plain, other), (other, plain)):
        styles, _ = lines(*order)
        assert styles == {"a": "c0 g0", "a compiled": "c0 g1"}  # the style sheet has dashes for g1, none for g0


def test_a_label_keeps_its_colour_over_its_groups() -> None:
    place = (0.0, 1.0)
    styles, paths = lines(
        Series("a", place, (0.0, 1.0)),
        Series("a", place, (1.0, 0.0), group="compiled"),
        Series("b", place, (2.0, 0.0)),
    )
    colour = {name: style.split()[0] for name, style in styles.items()}
    assert colour["a"] == colour["a compiled"] != colour["b"]
    assert [path.get("class") for path in paths] == list(styles.values())


def test_a_line_that_another_lies_on_is_drawn_wider_and_one_that_shows_is_not() -> None:
    place = (0.0, 1.0)
    _, paths = lines(Series("a", place, (0.0, 1.0)), Series("b", place, (0.0, 1.0)), Series("c", place, (0.0, 0.5)))
    assert [path.get("style") for path in paths] == ["stroke-width:3", None, None]


@pytest.mark.parametrize("values", [(2e-4, 7e-4), (1.1e-3, 1.3e-3), (0.4, 4.0), (1e-6, 1.0)])
def test_a_logarithmic_axis_has_at_least_two_labels(values: tuple[float, float]) -> None:
    drawing = parsed(
        draw_chart(Chart("line", "a", "x", "y", series=(Series("s", values, values),), y_scale="log", x_scale="log"))
    )
    labels = [text for text in drawing.iter("text") if text.text]
    for anchor in ("middle", "end"):  # at the x axis, at the y axis
        assert len({text.text for text in labels if text.get("text-anchor") == anchor}) >= 2


def test_a_line_of_very_many_points_is_drawn_small_and_keeps_its_extremes() -> None:
    steps = list(range(100_000))
    values = [0.0] * len(steps)
    values[54_321], values[77_777] = 5.0, -3.0
    drawing = draw_chart(Chart("line", "a", "step", "y", series=(Series("s", steps, values),)))
    assert len(drawing) < 40_000
    heights = [int(y) for y in re.findall(r"[ML]\d+ (\d+)", drawing)]
    assert max(heights) - min(heights) > 900  # of 1,000
