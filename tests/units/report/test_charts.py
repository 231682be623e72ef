"""Charts: well-formed, described, deterministic, and never at a loss for a number."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import sample_run as sample
from sample_run import BFLOAT16, FLOAT16, parsed, sample_run, texts

import ampcheck
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Band, Chart, Run, Series
from ampcheck.report.charts import describe_chart, draw_chart

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("chart", sample_run().charts, ids=lambda chart: chart.title)
def test_a_chart_is_well_formed_described_and_as_wide_as_its_page(chart: Chart) -> None:
    drawings = [svg for svg in parsed(draw_chart(chart)).iter("svg") if svg.get("role") == "img"]
    assert drawings
    assert all(svg.get("aria-label") and svg.get("width", "100%") == "100%" for svg in drawings)
    if chart.kind != "range":  # whose rows are described one by one
        assert (drawings[0].get("aria-label") or "").startswith(chart.title)


def test_the_same_chart_gives_the_same_text() -> None:
    chart = sample_run().charts[0]
    assert draw_chart(chart) == draw_chart(chart)


def test_charts_need_no_plotting_library(tmp_path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import runpy; sys.argv = ['', sys.argv[1]]; "
    code += f"runpy.run_path({sample.__file__!r}, run_name='__main__')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "page.html")], check=True, timeout=120)
    assert "<svg" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_rows_formats_and_powers_of_two_are_named() -> None:
    row = (-20.0, -10.0, -4.0, 2.0, 9.0)
    series = (Series("net.a.conv", row, group="forward"), Series("net.b.conv", row, group="backward"))
    words = texts(draw_chart(Chart("range", "t", "absolute value", series=series, bands=FLOAT16 + BFLOAT16)))
    assert {"net.", "a.conv", "b.conv", "forward", "backward", "absolute value", "outside float16"} <= set(words)
    assert {"2⁻²⁴", "2⁰", "2¹⁶", "bfloat16 normal: 2⁻¹²⁶ … 2¹²⁸", "float16 normal: 2⁻¹⁴ … 2¹⁶"} <= set(words)
    assert not {"◂ zero", "▸ inf", "✕ NaN"} & set(words)


def test_zeros_infinities_and_nan_are_marked() -> None:
    series = (Series("a", (-INF, -2, 0, 1, 2)), Series("b", (-3, -2, 0, 1, INF)), Series("c", [NAN] * 5))
    assert {"◂ zero", "▸ inf", "✕ NaN"} <= set(
        texts(draw_chart(Chart("range", "t", "x", series=series, bands=FLOAT16)))
    )


def test_long_names_give_way_in_the_middle() -> None:
    name = "first" + "x" * 100 + "last"
    label = next(
        t for t in texts(draw_chart(Chart("range", "t", "x", series=(Series(name, (1, 2, 3, 4, 5)),)))) if "…" in t
    )
    assert label.startswith("first")
    assert label.endswith("last")
    assert len(label) <= 60


@pytest.mark.parametrize("bands", [(), FLOAT16, (Band("", NAN, INF), Band("a", 5, 1), Band("b", -1e9, 0))])
@pytest.mark.parametrize(
    "x",
    [(), [NAN] * 5, [INF] * 5, [-INF] * 5, [0] * 5, (1, 2), (3,), (-1e308, 0, 0, 0, 1e308), (-INF, NAN, 0, INF, INF)],
)
def test_a_range_of_any_numbers_is_drawn(x, bands) -> None:
    parsed(draw_chart(Chart("range", "t", "x", series=(Series("a", x),), bands=bands)))


@pytest.mark.parametrize(
    ("x", "y"),
    [((), ()), ((1,), (NAN,)), ((NAN,), (1,)), ((1, 2), (1e308, -1e308)), ((1, 2), (5e-324, 1e299))],
)
def test_a_line_of_any_numbers_is_drawn(x, y) -> None:
    parsed(draw_chart(Chart("line", "t", "x", series=(Series("a", x, y),))))


@pytest.mark.parametrize("kind", ["range", "line"])
def test_a_chart_without_series_is_drawn(kind: str) -> None:
    parsed(draw_chart(Chart(kind, "t", "x")))


def test_text_is_neither_a_formula_nor_a_warning() -> None:
    label = "a$\\frac{$<b>\x00模型"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svg = draw_chart(Chart("line", label, label, label, (Series(label, (1, 2), (3, 4)),)))
    assert "a$\\frac{$<b>\\x00模型" in texts(svg)


def test_a_wide_span_of_values_gets_a_logarithmic_axis() -> None:
    words = texts(draw_chart(Chart("line", "t", "x", series=(Series("a", (1, 2, 3), (1, 10, 1e6)),))))
    assert {"1", "100", "10,000"} <= set(words)


def test_the_description_says_what_is_to_be_seen() -> None:
    chart = Chart("line", "t", "step", series=(Series("loss", (0, 9), (4.0, 0.5), "eager"),))
    assert describe_chart(chart) == "Line chart of 1 series (eager); step from 0 to 9; loss ends at 0.5."


def test_an_unknown_kind_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="range or line, not 'pie'"):
        draw_chart(Chart("pie", "t", "x"))


# Values themselves ----------------------------------------------------------------------------------------------------


def linear(*values: float, label: str = "compiled") -> Chart:
    return Chart("range", "t", "times as fast", series=(Series(label, values),), scale="linear")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.4, 0.8, 1.0, 1.2, 1.6), {"0.4", "1", "1.6"}),
        ((0.98, 0.99, 1.0, 1.01, 1.02), {"0.98", "1", "1.02"}),
        ((0.002, 0.003, 0.004, 0.005, 0.006), {"0.002", "0.004", "0.006"}),
        ((1000.0, 2500.0, 4000.0, 9000.0, 40000.0), {"5,000", "40,000"}),
        ((1.5, 1.5, 1.5, 1.5, 1.5), {"1.5"}),
    ],
)
def test_ratios_and_times_have_ticks_of_their_own_and_no_powers_of_two(
    values: tuple[float, ...], expected: set[str]
) -> None:
    words = texts(draw_chart(linear(*values)))
    assert expected <= set(words), words
    assert not [word for word in words if word.startswith("2") and set(word) & set("⁻⁰¹²³⁴⁵⁶⁷⁸⁹")]


def drawn(chart: Chart) -> tuple[float, float]:
    """Where the thick line of the first row begins and ends, as shares of the width of the picture."""
    line = next(line for line in parsed(draw_chart(chart)).iter("line") if "thick" in (line.get("class") or ""))
    begin, end = (float((line.get(name) or "").removesuffix("%")) / 100 for name in ("x1", "x2"))
    return begin, end


def test_a_picture_of_values_is_as_wide_as_they_are_however_small_or_large() -> None:
    for factor in (1e-6, 1.0, 1e6):
        begin, end = drawn(linear(*(factor * x for x in (0.9, 0.95, 1.0, 1.05, 1.1))))
        assert end - begin > 0.3, factor


def test_a_chart_says_its_scale_and_older_charts_are_of_exponents() -> None:
    run = Run(charts=(linear(1.0, 1.1, 1.2, 1.3, 1.4),))
    data = run.to_json()
    assert Run.from_json(data) == replace(run, charts=(Run.from_json(data).charts[0],))
    assert Run.from_json(data).charts[0].scale == "linear"
    del data["charts"][0]["scale"]
    assert Run.from_json(data).charts[0].scale == "exponent"


def test_an_unknown_scale_is_told() -> None:
    with pytest.raises(UsageError, match="scale of a chart must be exponent or linear, not 'log'"):
        draw_chart(replace(linear(1.0), scale="log"))


def test_values_that_are_not_finite_are_marks_at_the_edge_and_minus_infinity_is_no_zero() -> None:
    words = texts(draw_chart(linear(-INF, 1.0, NAN, 2.0, INF)))
    assert {"◂ -inf", "▸ inf", "✕ NaN"} <= set(words)
    assert "◂ zero" not in words
    assert texts(draw_chart(linear())) is not None


def test_no_chart_of_speed_takes_its_ratios_or_times_for_exponents() -> None:
    folder = Path(ampcheck.__file__).parent / "speed"
    calls = [
        (path.name, {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg == "scale"})
        for path in folder.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Chart"
        if isinstance(call.args[0], ast.Constant) and call.args[0].value == "range"
    ]
    assert len(calls) >= 3
    assert all(said == {"scale": "linear"} for _, said in calls), calls
