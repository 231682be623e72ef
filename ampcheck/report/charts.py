"""Charts as inline SVG, drawn by matplotlib without pyplot: the same bytes for the same chart."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from ampcheck.core.run import Chart, Marker
from ampcheck.report.magnitudes import (
    ALARM,
    COLOURS,
    FONT,
    LABEL_LENGTH,
    SCALES,
    STYLE,
    canvas,
    draw_histogram,
    draw_range,
    legend,
)
from ampcheck.report.text import clean, number, shorten_middle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_MARKER_LENGTH = 26
_NEAR = 0.01
"""Lines closer than this part of the chart's height cannot be distinguished."""


def chart_svg(chart: Chart, *, key: str = "chart") -> str:
    """`chart` as an `<svg>` element; charts of one page need different keys, or their ids collide.

    Values that are not finite become marks at the edge (`range`) or gaps (`line`, `histogram`).
    """
    from matplotlib import style

    with style.context(["default", {**STYLE, "svg.hashsalt": key}]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph that matplotlib's font lacks: the browser has its own fonts
        figure = {"histogram": draw_histogram, "range": draw_range, "line": draw_line}[chart.kind](chart)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _inline(stream.getvalue(), f"{chart.title}. {describe_chart(chart)}")


def describe_chart(chart: Chart) -> str:
    """A description of the chart for screen readers."""
    groups = [group for group in dict.fromkeys(series.group for series in chart.series) if group]
    finite = [x for series in chart.series for x in series.x if math.isfinite(x)]
    parts = [
        f"{chart.kind.capitalize()} chart of {len(chart.series)} series" + (f" ({', '.join(groups)})" * bool(groups))
    ]
    if finite:
        parts.append(f"{chart.x_label or 'x'} from {number(min(finite))} to {number(max(finite))}")
    parts += [f"band {band.label} from {number(band.low)} to {number(band.high)}" for band in chart.bands]
    if chart.kind == "line":
        parts += [f"{' '.join((marker.group, marker.label)).strip()} at {number(marker.x)}" for marker in chart.markers]
        parts += [f"{series.label} ends at {number(series.y[-1])}" for series in chart.series if series.y]
    return clean("; ".join(parts) + ".")


def _inline(svg: str, description: str) -> str:
    """The `<svg>` of a document for use inside HTML: no namespaces, no fixed size, only ids that are referred to."""
    root = ElementTree.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", svg))
    ids = {name for pair in re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", svg) for name in pair}
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(key): value for key, value in element.attrib.items() if key != "id" or value in ids}
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag in ("metadata", "style")]:
            parent.remove(child)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib |= {"role": "img", "aria-label": clean(description), "stroke-linejoin": "round"}
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: object) -> str:
    return str(name).rpartition("}")[2]


def draw_line(chart: Chart) -> Figure:
    """Series over x; values that are not finite are gaps."""
    lines = [_drawable(series.x, series.y) for series in chart.series]
    names = [
        shorten_middle(clean(" ".join(part for part in (series.label, series.group) if part)), LABEL_LENGTH)
        for series in chart.series
    ]
    marked = dict.fromkeys(marker.group for marker in chart.markers if marker.group and math.isfinite(marker.x))
    axes = canvas(
        [*names, *(band.label for band in chart.bands), *marked], left=58, above=0, inner_height=230.0, bottom=36
    )
    for band in chart.bands:
        if math.isfinite(band.low) and math.isfinite(band.high):
            axes.axvspan(band.low, band.high, facecolor="#e8e8e8", edgecolor="none", zorder=0, label=clean(band.label))
    # A label has one colour in all its groups; a series without a group is solid.
    groups = sorted(dict.fromkeys(series.group for series in chart.series), key=bool)
    labels = list(dict.fromkeys(series.label for series in chart.series))
    for index, (series, name, (x, y)) in enumerate(zip(chart.series, names, lines, strict=True)):
        colour = COLOURS[labels.index(series.label) % len(COLOURS)]
        axes.plot(
            x,
            y,
            color=colour,
            linestyle=("-", "--", ":", "-.")[groups.index(series.group) % 4],
            linewidth=1.4 + 1.2 * _covering(index, lines),  # a covered line shows at both sides
            marker="o" if len(x) <= 30 else None,
            markersize=3,
            label=name or "_",
        )
        interval_x, low, high = _drawable(series.x, series.low, series.high)
        if interval_x:
            axes.fill_between(interval_x, low, high, facecolor=colour, alpha=0.18, edgecolor="none", zorder=1)
    _scale_y(axes, chart, [value for _, y in lines for value in y if math.isfinite(value)])
    _scale_x(axes, chart, [float(value) for x, _ in lines for value in x if math.isfinite(value)])
    axes.grid()
    _draw_markers(axes, chart.markers)
    axes.set_xlabel(clean(chart.x_label))
    axes.set_ylabel(clean(chart.y_label))
    figure: Figure = axes.figure  # type: ignore[assignment]
    legend(figure, axes)
    return figure


def _drawable(*columns: Sequence[float]) -> list[list[float]]:
    """The columns at their common length; values that are not finite or too large become gaps."""
    length = min(map(len, columns))
    return [[value if abs(value) < 1e300 else math.nan for value in column[:length]] for column in columns]


def _covering(index: int, lines: Sequence[list[list[float]]]) -> int:
    """How many later lines are drawn on top of this one."""
    values = [value for _, y in lines for value in y if math.isfinite(value)]
    near = _NEAR * (max(values) - min(values)) if values else 0.0
    x, y = lines[index]
    return sum(
        x == other_x and all(a == b or abs(a - b) <= near for a, b in zip(y, other_y, strict=True))
        for other_x, other_y in lines[index + 1 :]
        if x
    )


def _scale_y(axes: Axes, chart: Chart, values: Sequence[float]) -> None:
    """Scale the axis as the chart requires; by default a wide range of values gets a logarithmic axis."""
    if not values:
        axes.text(0.5, 0.5, "no finite values", transform=axes.transAxes, ha="center", color="#666666")
    elif chart.y_scale == "exponent":
        low, high = axes.get_ylim()
        axes.set_yticks(*SCALES["exponent"].ticks(low, high))
        axes.set_ylim(low, high)
    elif chart.y_scale == "log" or (not chart.y_scale and min(values) > 0 and max(values) / min(values) > 1e3):
        axes.set_yscale("log")
        _label_log(axes.yaxis)


def _scale_x(axes: Axes, chart: Chart, values: Sequence[float]) -> None:
    from matplotlib.ticker import MaxNLocator

    if chart.x_scale == "exponent" and values:
        axes.set_xticks(*SCALES["exponent"].ticks(min(values), max(values)))
    elif chart.x_scale == "log":
        axes.set_xscale("log")
        _label_log(axes.xaxis)
    elif all(value.is_integer() for value in values):  # steps have no halves
        axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, steps=[1, 2, 2.5, 5, 10]))
    if len(set(values)) == 1:
        axes.set_xlim(values[0] - 1, values[0] + 1)


def _label_log(axis: Axis) -> None:
    """Label powers of ten only; if fewer than two are visible, label the ticks between them, too."""
    from matplotlib.ticker import NullLocator

    axis.set_major_formatter(lambda value, _: number(value))
    low, high = sorted(axis.get_view_interval())
    if sum(low <= tick <= high for tick in axis.get_majorticklocs()) < 2:
        axis.set_minor_formatter(lambda value, _: number(value))
        axis.grid(visible=True, which="minor")
    else:
        axis.set_minor_locator(NullLocator())


def _draw_markers(axes: Axes, markers: Sequence[Marker]) -> None:
    """Labelled vertical lines; the groups alternate between the sides, and each is once in the legend."""
    shown = [marker for marker in markers if math.isfinite(marker.x)]
    groups = list(dict.fromkeys(marker.group for marker in shown))
    if shown and axes.get_yscale() == "linear":  # room for the labels above the lines
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.4 * (high - low))
    in_legend: set[str] = set()
    for marker in shown:
        index = groups.index(marker.group)
        colour, dashes = (ALARM, "#444444", *COLOURS)[index % 10], ("-", (0, (4, 3)), ":")[index % 3]
        name = "_" if marker.group in in_legend else clean(marker.group) or "_"
        in_legend.add(marker.group)
        axes.axvline(marker.x, color=colour, linewidth=1.1, linestyle=dashes, zorder=1.5, label=name)
        side: dict[str, Any] = {"ha": "left" if index % 2 else "right", "va": "top", "rotation": 90}
        side |= {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        label = shorten_middle(clean(marker.label), _MARKER_LENGTH)
        axes.annotate(label, (marker.x, 1), (2.0 if index % 2 else -1.5, -2), fontsize=FONT - 1.5, color=colour, **side)
