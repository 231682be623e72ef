"""Colours, margins and legends of all charts. Lengths are in points."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
