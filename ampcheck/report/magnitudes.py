"""Histograms and range charts: values on an axis of magnitudes, compared with the ranges of the formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

from ampcheck.core.run import Band, Chart
from ampcheck.report.text import clean, number, shorten_middle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDTH = 680.0
COLOURS = ("#0068ad", "#d55e00", "#007f5f", "#a8437f", "#7a5c00", "#444444", "#3f9fd8", "#b00020")  # after Okabe-Ito
ALARM = "#b00020"
LABEL_LENGTH = 40
FONT = 8.5
STYLE = {
    "svg.fonttype": "none",  # text stays text: small, searchable, readable by screen readers
    "text.parse_math": False,  # a module path with a dollar sign is no formula
    "font.family": "sans-serif",
    "font.size": FONT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "grid.color": "#00000022",
    "grid.linewidth": 0.5,
}


def canvas(labels: Sequence[str], *, left: float, above: float, inner_height: float, bottom: float) -> Axes:
    """Axes of a new figure, with room at the top for a legend of `labels` and for `above` further points.

    A taller chart keeps the size of its text.
    """
    from matplotlib.figure import Figure

    top = 12.0 + 12.5 * math.ceil(len(labels) / _legend_columns(labels)) + above
    height = top + inner_height + bottom
    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, facecolor="none")
    return figure.add_axes((left / WIDTH, bottom / height, (WIDTH - left - 12) / WIDTH, inner_height / height))


def _legend_columns(labels: Sequence[str]) -> int:
    widest = max([len(label) for label in labels], default=0) * FONT * 0.56 + 32
    return max(1, min(len(labels), int((WIDTH - 20) / widest)))


def legend(figure: Figure, axes: Axes) -> None:
    """Draw the legend at the left, where a narrow screen begins."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        spacing = {"borderaxespad": 0.2, "handletextpad": 0.4, "columnspacing": 1.4}
        figure.legend(handles, labels, loc="upper left", ncols=_legend_columns(labels), frameon=False, **spacing)


Ticks: TypeAlias = "tuple[list[float], list[str]]"
"""Positions and labels."""

Lane: TypeAlias = "list[Band]"
"""The bands of one format."""

_BAND_COLOURS = (("#cfe3d4", "#f2e2b3"), ("#d5dcec", "#e6d9ea"), ("#e0e0e0", "#eeeeee"))
_OUTSIDE = "#fbe9e7"
_STRIP = 15.0  # height of the strip of a format
_DRAWABLE = 1e300


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis of magnitudes.

    far: values further out do not widen the chart. below: the name of minus infinity. margin: the smallest one of
    values from low to high. name: the label of a value. ticks: those of a chart from low to high.
    """

    far: float
    below: str
    margin: Callable[[float, float], float]
    name: Callable[[float], str]
    ticks: Callable[[float, float], Ticks]


def _power(exponent: float) -> str:
    return "2" + number(round(exponent, 1)).translate(str.maketrans("-0123456789.", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹·"))


def _power_ticks(low: float, high: float) -> Ticks:
    step = next((step for step in (1, 2, 4, 8, 16, 32, 64, 128) if (high - low) / step <= 14), 512)
    ticks = range(math.ceil(low / step) * step, math.floor(high) + 1, step)
    return list(map(float, ticks)), [_power(tick) for tick in ticks]


def _plain_ticks(low: float, high: float) -> Ticks:
    from matplotlib.ticker import MaxNLocator

    candidates = MaxNLocator(10, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    ticks = [float(tick) for tick in candidates if low <= tick <= high]
    digits = next((n for n in range(3, 16) if len({number(tick, n) for tick in ticks}) == len(ticks)), 16)
    return ticks, [number(tick, digits) for tick in ticks]


def _plain_margin(low: float, high: float) -> float:
    return (0.05 if low == high else 1e-6) * max(abs(low), abs(high)) or 1.0  # a single value is in the middle


SCALES = {
    "exponent": Scale(2000.0, "zero", lambda low, high: 1.0, _power, _power_ticks),  # beyond all of float64
    "linear": Scale(_DRAWABLE, "-inf", _plain_margin, number, _plain_ticks),
}
"""By the name in `Chart.scale`."""


def draw_histogram(chart: Chart) -> Figure:
    """Each series as a filled outline, the formats as strips above."""
    labels = [shorten_middle(clean(series.label), LABEL_LENGTH) for series in chart.series]
    highest = 0.0
    with _magnitude_axes(chart, labels, left=58, inner_height=190.0, bottom=36) as (figure, axes):
        for index, (series, label) in enumerate(zip(chart.series, labels, strict=True)):
            counts = [count if abs(count) < _DRAWABLE else 0.0 for count in series.y]
            if counts:
                highest = max(highest, *counts)
                colour = COLOURS[index % len(COLOURS)]
                axes.stairs(counts, series.x, fill=True, color=colour, alpha=0.28, zorder=2)
                axes.stairs(counts, series.x, color=colour, linewidth=1.3, zorder=2.5, label=label or "_")
        axes.set_ylim(0, 1.06 * highest or 1.0)
        axes.yaxis.set_major_formatter(lambda value, _: number(value))
        axes.grid(axis="y")
    return figure


def draw_range(chart: Chart) -> Figure:
    """Rows of modules: a thin line from smallest to largest, a thick one from p05 to p95, a dot at the median."""
    rows = list(dict.fromkeys(series.label for series in chart.series))
    groups = list(dict.fromkeys(series.group for series in chart.series))
    scale = SCALES[chart.scale]
    marks: tuple[tuple[str, Callable[[Sequence[float]], bool], int, dict[str, Any]], ...] = (
        (scale.below, lambda values: -math.inf in values, 0, {"marker": "<", "color": "#333333"}),
        ("inf", lambda values: math.inf in values, 1, {"marker": ">", "color": ALARM}),
        ("NaN", lambda values: any(map(math.isnan, values)), 1, {"marker": "x", "color": ALARM}),
    )
    all_values = [value for series in chart.series for value in series.x]
    prefix = _common_prefix(rows)
    names = [shorten_middle(clean(row[len(prefix) :]), LABEL_LENGTH) or "(root)" for row in rows]
    longest = max([len(name) for name in names], default=0)
    pitch = 9.0 if len(groups) < 2 else 7.0 * len(groups) + 2
    height = max(len(rows), 1)
    with _magnitude_axes(
        chart,
        [*groups, *(name for name, is_in, _, _ in marks if is_in(all_values))],
        left=14 + max(longest, 16) * FONT * 0.6,
        inner_height=height * pitch,
        bottom=34,
    ) as (figure, axes):
        axes.set_ylim(height - 0.5, -0.5)
        limits = axes.get_xlim()
        axes.hlines([row + 0.5 for row in range(len(rows) - 1)], *limits, colors="white", linewidth=1.0)
        positions: list[tuple[float, Sequence[float]]] = []
        for index, group in enumerate(groups):
            shift = (index - (len(groups) - 1) / 2) * 7.0 / pitch
            members = [(rows.index(s.label) + shift, s.x) for s in chart.series if s.group == group]
            _draw_rows(axes, members, COLOURS[index % len(COLOURS)], clean(group))
            positions += members
        for name, is_in, side, look in marks:
            if ys := [y for y, values in positions if is_in(values)]:
                edge = [limits[side]] * len(ys)
                axes.plot(edge, ys, markersize=4.5, linestyle="", clip_on=False, zorder=5, label=name, **look)
        axes.set_yticks(range(len(rows)), names, fontfamily="monospace")
        axes.tick_params(length=0, axis="y")
        if prefix:
            head = shorten_middle(clean(prefix), max(longest, 16))
            at_labels: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right"}
            axes.annotate(head, (0, 1), (-3.5, 4), color="#555555", fontfamily="monospace", **at_labels)
    return figure


def _common_prefix(rows: Sequence[str]) -> str:
    """The dotted path that all rows share, which is written once above them."""
    if len(rows) < 2:
        return ""
    parts = [row.split(".")[:-1] for row in rows]
    shared = takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))
    return "".join(f"{names[0]}." for names in shared)


def _draw_rows(axes: Axes, rows: Sequence[tuple[float, Sequence[float]]], colour: str, group: str) -> None:
    low, high = axes.get_xlim()
    thin, thick, medians = [], [], []
    for y, values in rows:
        inside = [min(max(value, low), high) for value in values if not math.isnan(value)]
        if inside:
            thin.append((y, inside[0], inside[-1]))
        if len(values) == len(inside) == 5:
            thick.append((y, inside[1], inside[3]))
            medians.append((inside[2], y))
    for lines, width in ((thin, 1.0), (thick, 3.6)):
        if lines:
            ys, starts, ends = zip(*lines, strict=True)
            axes.hlines(ys, starts, ends, colors=colour, linewidth=width)
    dot: dict[str, Any] = {"marker": "o", "markersize": 3.4, "markerfacecolor": "white", "markeredgewidth": 1.1}
    axes.plot([x for x, _ in medians], [y for _, y in medians], linestyle="", markeredgecolor=colour, **dot)
    if group:
        axes.plot([], [], color=colour, linewidth=3.6, label=group, **dot)


# The axis and the formats --------------------------------------------------------------------------------------------


@contextmanager
def _magnitude_axes(
    chart: Chart, labels: Sequence[str], *, left: float, inner_height: float, bottom: float
) -> Iterator[tuple[Figure, Axes]]:
    """Axes to draw the series in, with the formats behind them; labels, strips and legend are added on leaving."""
    scale = SCALES[chart.scale]
    lanes = _lanes(chart.bands, scale.far)
    outside = f"outside {clean(_format_of(lanes[0][0]))}" if lanes else ""
    above = _STRIP * len(lanes)
    axes = canvas([*labels, outside], left=left, above=above, inner_height=inner_height, bottom=bottom)
    figure: Figure = axes.figure  # type: ignore[assignment]
    low, high = _limits(chart, lanes, scale)
    axes.set_xlim(low, high)
    if lanes:
        _shade(axes, lanes)
    yield figure, axes
    if lanes:
        axes.fill_between([], [], facecolor=_OUTSIDE, edgecolor="#c9a19c", label=outside)
    axes.set_xticks(*scale.ticks(low, high))
    axes.grid(axis="x")
    axes.set_xlabel(clean(chart.x_label))
    axes.set_ylabel(clean(chart.y_label))
    _draw_strips(figure, axes, lanes, scale)
    legend(figure, axes)


def _lanes(bands: Sequence[Band], far: float) -> list[Lane]:
    """The bands of each format, the narrowest format first."""
    lanes: dict[str, Lane] = {}
    for band in bands:
        if -far <= band.low < band.high <= far:
            lanes.setdefault(_format_of(band), []).append(band)
    return sorted(lanes.values(), key=lambda lane: max(band.high for band in lane) - min(band.low for band in lane))


def _format_of(band: Band) -> str:
    return band.label.partition(" ")[0]


def _limits(chart: Chart, lanes: Sequence[Lane], scale: Scale) -> tuple[float, float]:
    """Limits that include all values and the narrowest format; wider formats reach beyond the chart."""
    points = [x for series in chart.series for x in series.x if abs(x) <= scale.far]
    points += [edge for band in (lanes[0] if lanes else ()) for edge in (band.low, band.high)]
    low, high = (min(points), max(points)) if points else (-1.0, 1.0)
    margin = max(0.03 * (high - low), scale.margin(low, high))
    return low - margin, high + margin


def _shade(axes: Axes, lanes: Sequence[Lane]) -> None:
    """The narrowest format in colour, values outside it in red, and the edges of the others as dashes."""
    axes.set_facecolor(_OUTSIDE)
    for colour, band in _coloured(lanes[0], 0):
        axes.axvspan(band.low, band.high, facecolor="white", edgecolor="none", zorder=0)
        axes.axvspan(band.low, band.high, facecolor=colour, alpha=0.35, edgecolor="none", zorder=0)
    low, high = axes.get_xlim()
    for edge in sorted({edge for lane in lanes for band in lane for edge in (band.low, band.high)}):
        if low < edge < high:
            axes.axvline(edge, color="#666666", linewidth=0.6, linestyle=(0, (3, 3)), zorder=0.5)


def _coloured(lane: Lane, index: int) -> Iterator[tuple[str, Band]]:
    """The widest band of a lane has the lane's main colour."""
    main, other = _BAND_COLOURS[min(index, len(_BAND_COLOURS) - 1)]
    widest = max(lane, key=lambda band: band.high - band.low)
    for band in lane:
        yield (main if band is widest else other), band


def _draw_strips(figure: Figure, axes: Axes, lanes: Sequence[Lane], scale: Scale) -> None:
    """The formats as labelled strips above the axes, on the same x axis."""
    box = axes.get_position()
    low, high = axes.get_xlim()
    unit = _STRIP / (figure.get_figheight() * 72)
    points = box.width * WIDTH / (high - low)
    for index, lane in enumerate(lanes):
        strip = figure.add_axes((box.x0, box.y1 + unit * (index + 0.15), box.width, unit * 0.8))
        strip.set_axis_off()
        strip.set_xlim(low, high)
        strip.set_ylim(0, 1)
        for colour, band in _coloured(lane, index):
            shown_low, shown_high = max(band.low, low), min(band.high, high)
            if shown_low >= shown_high:
                continue
            strip.axvspan(shown_low, shown_high, facecolor=colour, edgecolor="white", linewidth=0.8)
            name = clean(band.label)
            long = f"{name}: {scale.name(band.low)} … {scale.name(band.high)}"
            characters = (shown_high - shown_low) * points / (0.56 * (FONT - 1.5))
            label = next((text for text in (long, name, name.split(" ")[-1]) if len(text) < characters), "")
            strip.text((shown_low + shown_high) / 2, 0.46, label, ha="center", va="center", fontsize=FONT - 1.5)
