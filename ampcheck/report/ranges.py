"""Range charts: where the values of each module lie, row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ampcheck.core.run import Chart
from ampcheck.report.canvas import (
    ALARM,
    COLOURS,
    FONT,
    LABEL_LENGTH,
    OUTSIDE,
    STRIP,
    canvas,
    draw_strips,
    format_in,
    lanes_of,
    legend,
    legend_height,
    limits_of,
    shade,
)
from ampcheck.report.scales import SCALES, Scale
from ampcheck.report.text import clean, shorten_middle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_range(chart: Chart) -> Figure:
    """Rows of modules: a thin line from smallest to largest, a thick one from p05 to p95, a dot at the median."""
    rows = list(dict.fromkeys(series.label for series in chart.series))
    groups = list(dict.fromkeys(series.group for series in chart.series))
    scale = SCALES[chart.scale]
    lanes = lanes_of(chart.bands, scale.far)
    low, high = limits_of((x for series in chart.series for x in series.x), lanes, scale)
    prefix = _common_prefix(rows)
    names = [shorten_middle(clean(row[len(prefix) :]), LABEL_LENGTH) or "(root)" for row in rows]

    marks: dict[str, list[tuple[float, float]]] = {scale.below: [], "inf": [], "NaN": []}
    outside = f"outside {clean(format_in(lanes[0][0]))}" if lanes else ""
    longest = max([len(name) for name in names], default=0)
    left = 14 + max(longest, 16) * FONT * 0.6
    pitch = 9.0 if len(groups) < 2 else 7.0 * len(groups) + 2
    height = max(len(rows), 1) * pitch
    strips = STRIP * len(lanes)
    figure, axes = canvas(
        left=left,
        top=legend_height([*groups, *_marks_in(chart, scale), outside]) + strips,
        inner_height=height,
        bottom=34,
    )
    axes.set_xlim(low, high)
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)

    shade(axes, lanes)
    axes.hlines([row + 0.5 for row in range(len(rows) - 1)], low, high, colors="white", linewidth=1.0)
    for index, group in enumerate(groups):
        shift = (index - (len(groups) - 1) / 2) * 7.0 / pitch
        members = [(rows.index(s.label) + shift, s.x) for s in chart.series if s.group == group]
        _draw_rows(axes, members, COLOURS[index % len(COLOURS)], clean(group), marks)
    for (name, points), marker in zip(marks.items(), "<>x", strict=True):
        if points:  # not finite, or zero as an exponent: drawn at the edge, as there is no place beyond it
            mark: dict[str, Any] = {
                "marker": marker,
                "markersize": 4.5,
                "color": "#333333" if marker == "<" else ALARM,
            }
            axes.plot(*_columns(points), linestyle="", clip_on=False, zorder=5, label=name, **mark)
    if lanes:
        axes.fill_between([], [], facecolor=OUTSIDE, edgecolor="#c9a19c", label=outside)
    axes.set_yticks(range(len(rows)), names, fontfamily="monospace")
    axes.tick_params(length=0, axis="y")
    if prefix:
        head = shorten_middle(clean(prefix), max(longest, 16))
        at_labels: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right"}
        axes.annotate(head, (0, 1), (-3.5, 4), color="#555555", fontfamily="monospace", **at_labels)
    axes.set_xticks(*scale.ticks(low, high))
    axes.grid(axis="x")
    axes.set_xlabel(clean(chart.x_label))
    axes.set_ylabel(clean(chart.y_label))
    draw_strips(figure, axes, lanes, scale)
    legend(figure, axes)
    return figure


def _marks_in(chart: Chart, scale: Scale) -> list[str]:
    values = [value for series in chart.series for value in series.x]
    found = {scale.below: -math.inf in values, "inf": math.inf in values, "NaN": any(map(math.isnan, values))}
    return [name for name, there in found.items() if there]


def _common_prefix(rows: Sequence[str]) -> str:
    """The dotted path that all rows share: it is said once, above the rows."""
    if len(rows) < 2:
        return ""
    parts = [row.split(".")[:-1] for row in rows]
    shared = takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))
    return "".join(f"{names[0]}." for names in shared)


def _draw_rows(
    axes: Axes,
    rows: Sequence[tuple[float, Sequence[float]]],
    colour: str,
    group: str,
    marks: dict[str, list[tuple[float, float]]],
) -> None:
    low, high = axes.get_xlim()
    below = next(iter(marks))
    thin, thick, medians = [], [], []
    for y, values in rows:
        inside = [min(max(value, low), high) for value in values if not math.isnan(value)]
        marks["NaN"] += [(high, y)] * (len(inside) < len(values))
        marks[below] += [(low, y)] * (-math.inf in values)
        marks["inf"] += [(high, y)] * (math.inf in values)
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
    axes.plot(*_columns(medians), linestyle="", markeredgecolor=colour, **dot)
    if group:
        axes.plot([], [], color=colour, linewidth=3.6, label=group, **dot)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
