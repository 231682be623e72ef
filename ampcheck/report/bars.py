"""Histograms: how many of what lie where, against the range of the formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ampcheck.core.run import Chart, Series
from ampcheck.report.canvas import (
    COLOURS,
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
from ampcheck.report.scales import SCALES
from ampcheck.report.text import clean, number, shorten_middle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEIGHT = 190.0


def draw_histogram(chart: Chart) -> Figure:
    """Each series as a filled outline; the formats as strips above, as in a range chart."""
    scale = SCALES[chart.scale]
    lanes = lanes_of(chart.bands, scale.far)
    low, high = limits_of((x for series in chart.series for x in series.x), lanes, scale)
    outside = f"outside {clean(format_in(lanes[0][0]))}" if lanes else ""
    labels = [shorten_middle(clean(series.label), LABEL_LENGTH) for series in chart.series]
    top = legend_height([*labels, outside]) + STRIP * len(lanes)
    figure, axes = canvas(left=58, top=top, inner_height=_HEIGHT, bottom=36)
    axes.set_xlim(low, high)
    shade(axes, lanes)
    highest = 0.0
    for index, (series, label) in enumerate(zip(chart.series, labels, strict=True)):
        edges, counts = _drawable(series)
        if counts:
            highest = max(highest, *counts)
            colour = COLOURS[index % len(COLOURS)]
            axes.stairs(counts, edges, fill=True, color=colour, alpha=0.28, zorder=2)
            axes.stairs(counts, edges, color=colour, linewidth=1.3, zorder=2.5, label=label or "_")
    if lanes:
        axes.fill_between([], [], facecolor=OUTSIDE, edgecolor="#c9a19c", label=outside)
    axes.set_ylim(0, 1.06 * highest or 1.0)
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    axes.set_xticks(*scale.ticks(low, high))
    axes.grid()
    axes.set_xlabel(clean(chart.x_label))
    axes.set_ylabel(clean(chart.y_label))
    draw_strips(figure, axes, lanes, scale)
    legend(figure, axes)
    return figure


def _drawable(series: Series) -> tuple[Sequence[float], Sequence[float]]:
    """Edges and counts that correspond; nothing where the edges do not rise or are not finite."""
    edges, counts = list(series.x), list(series.y)
    rising = all(one < other for one, other in pairwise(edges))
    if len(edges) != len(counts) + 1 or not counts or not rising or not all(abs(edge) < 1e300 for edge in edges):
        return (), ()
    return edges, [count if math.isfinite(count) and abs(count) < 1e300 else 0.0 for count in counts]
