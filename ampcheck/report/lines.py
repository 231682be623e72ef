"""Line charts: series over steps or magnitudes, with intervals, bands and markers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ampcheck.core.run import Chart, Marker, Series
from ampcheck.report.canvas import ALARM, COLOURS, FONT, LABEL_LENGTH, canvas, legend, legend_height
from ampcheck.report.scales import SCALES
from ampcheck.report.text import clean, number, shorten_middle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_MARKER_LENGTH = 26
_HEIGHT = 230.0
_WIDTH, _WIDER = 1.4, 1.2
_NEAR = 0.01
"""The part of the picture's height within which two lines are one to the eye."""


def draw_line(chart: Chart) -> Figure:
    """Series over x; what is not finite is a gap."""
    lines = [(series.group, *_paired(series)) for series in chart.series]
    names = [
        shorten_middle(clean(" ".join(part for part in (series.label, series.group) if part)), LABEL_LENGTH)
        for series in chart.series
    ]
    figure, axes = canvas(left=58, top=legend_height([*names, *_legend_extra(chart)]), inner_height=_HEIGHT, bottom=36)
    for band in chart.bands:
        if math.isfinite(band.low) and math.isfinite(band.high):
            axes.axvspan(band.low, band.high, facecolor="#e8e8e8", edgecolor="none", zorder=0, label=clean(band.label))
    # By name and not by place: a label keeps its colour over its groups, and what has no group is solid.
    groups = sorted(dict.fromkeys(series.group for series in chart.series), key=bool)
    labels = list(dict.fromkeys(series.label for series in chart.series))
    for index, (name, (group, x, y)) in enumerate(zip(names, lines, strict=True)):
        width = _WIDTH + _WIDER * _hidden(index, lines)
        look: dict[str, Any] = {"linewidth": width, "marker": "o" if len(x) <= 30 else None, "markersize": 3}
        dashes = ("-", "--", ":", "-.")[groups.index(group) % 4]
        colour = COLOURS[labels.index(chart.series[index].label) % len(COLOURS)]
        axes.plot(x, y, color=colour, linestyle=dashes, label=name or "_", **look)
        _draw_interval(axes, chart.series[index], colour)
    _scale_y(axes, chart, [value for _, _, y in lines for value in y if math.isfinite(value)])
    _scale_x(axes, chart, [float(value) for _, x, _ in lines for value in x if math.isfinite(value)])
    if len(places := {value for _, x, _ in lines for value in x if math.isfinite(value)}) == 1:
        axes.set_xlim(min(places) - 1, min(places) + 1)  # a single place has no width of its own
    axes.grid()
    _draw_markers(axes, chart.markers)
    axes.set_xlabel(clean(chart.x_label))
    axes.set_ylabel(clean(chart.y_label))
    legend(figure, axes)
    return figure


def _hidden(index: int, lines: Sequence[tuple[str, list[float], list[float]]]) -> int:
    """How many later lines lie on this one; it is drawn wider for each, so that it shows beside them."""
    values = [value for _, _, y in lines for value in y if math.isfinite(value)]
    near = _NEAR * (max(values) - min(values)) if values else 0.0
    _, x, y = lines[index]
    return sum(
        x == other_x and all(a == b or abs(a - b) <= near for a, b in zip(y, other_y, strict=True))
        for _, other_x, other_y in lines[index + 1 :]
        if x
    )


def _scale_y(axes: Axes, chart: Chart, values: Sequence[float]) -> None:
    """As the chart says; where it says nothing a wide span of values gets a logarithmic axis."""
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
        low, high = min(values), max(values)
        axes.set_xticks(*SCALES["exponent"].ticks(low, high))
    elif chart.x_scale == "log":
        axes.set_xscale("log")
        _label_log(axes.xaxis)
    elif all(value.is_integer() for value in values):  # steps have no halves
        axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, steps=[1, 2, 2.5, 5, 10]))


def _label_log(axis: Axis) -> None:
    """Powers of ten alone; where fewer than two are in view the ticks between them have labels."""
    from matplotlib.ticker import NullLocator

    axis.set_major_formatter(lambda value, _: number(value))
    low, high = sorted(axis.get_view_interval())
    if sum(low <= place <= high for place in axis.get_majorticklocs()) < 2:
        axis.set_minor_formatter(lambda value, _: number(value))
        axis.grid(visible=True, which="minor")
    else:
        axis.set_minor_locator(NullLocator())


def _legend_extra(chart: Chart) -> list[str]:
    """What stands in the legend of a line chart beside its series."""
    groups = dict.fromkeys(marker.group for marker in chart.markers if marker.group and math.isfinite(marker.x))
    return [*(band.label for band in chart.bands), *groups]


def _draw_interval(axes: Axes, series: Series, colour: str) -> None:
    """The band between `low` and `high`; where one of them is not finite there is a gap, as in the line."""
    ends = zip(series.x, series.low, series.high, strict=False)
    drawn = [tuple(value if abs(value) < 1e300 else math.nan for value in each) for each in ends]
    if drawn:
        x, low, high = zip(*drawn, strict=True)
        axes.fill_between(x, low, high, facecolor=colour, alpha=0.18, edgecolor="none", zorder=1)


def _draw_markers(axes: Axes, markers: Sequence[Marker]) -> None:
    """Upright lines with names beside them, at one side for each group; a group stands once in the legend."""
    shown = [marker for marker in markers if math.isfinite(marker.x)]
    groups = list(dict.fromkeys(marker.group for marker in shown))
    if shown and axes.get_yscale() == "linear":  # room for the names above what is drawn
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.4 * (high - low))
    named: set[str] = set()
    for marker in shown:
        place = groups.index(marker.group)
        colour, dashes = (ALARM, "#444444", *COLOURS)[place % 10], ("-", (0, (4, 3)), ":")[place % 3]
        name = "_" if marker.group in named else clean(marker.group) or "_"
        named.add(marker.group)
        axes.axvline(marker.x, color=colour, linewidth=1.1, linestyle=dashes, zorder=1.5, label=name)
        side: dict[str, Any] = {"ha": "left" if place % 2 else "right", "va": "top", "rotation": 90}
        where: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        label = shorten_middle(clean(marker.label), _MARKER_LENGTH)
        offset = (2.0 if place % 2 else -1.5, -2)
        axes.annotate(label, (marker.x, 1), offset, fontsize=FONT - 1.5, color=colour, **side, **where)


def _paired(series: Series) -> tuple[list[float], list[float]]:
    """x and y of the same length; what is not finite, or too large to be drawn, becomes a gap."""
    pairs = list(zip(series.x, series.y, strict=False))
    gap = math.nan
    return [x if abs(x) < 1e300 else gap for x, _ in pairs], [y if abs(y) < 1e300 else gap for _, y in pairs]
