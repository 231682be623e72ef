"""What the pictures share: colours, margins, legends, and formats as labelled strips above an axis of magnitudes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ampcheck.core.run import Band
from ampcheck.report.scales import Scale
from ampcheck.report.text import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 680.0
"""Width of every chart in points: the unit in which everything below is measured."""

COLOURS = ("#0068ad", "#d55e00", "#007f5f", "#a8437f", "#7a5c00", "#444444", "#3f9fd8", "#b00020")  # after Okabe-Ito
BAND_COLOURS = (("#cfe3d4", "#f2e2b3"), ("#d5dcec", "#e6d9ea"), ("#e0e0e0", "#eeeeee"))
OUTSIDE = "#fbe9e7"
ALARM = "#b00020"
LABEL_LENGTH = 40
FONT = 8.5
STRIP = 15.0
STYLE = {
    "svg.fonttype": "none",  # text stays text: small, searchable, read aloud
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


def canvas(*, left: float, top: float, inner_height: float, bottom: float) -> tuple[Figure, Axes]:
    """A figure whose margins are given in points, so that a taller chart keeps the size of its text."""
    from matplotlib.figure import Figure

    height = top + inner_height + bottom
    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, facecolor="none")
    axes = figure.add_axes((left / WIDTH, bottom / height, (WIDTH - left - 12) / WIDTH, inner_height / height))
    return figure, axes


def _legend_columns(labels: Sequence[str]) -> int:
    widest = max([len(label) for label in labels], default=0) * FONT * 0.56 + 32
    return max(1, min(len(labels), int((WIDTH - 20) / widest)))


def legend_height(labels: Sequence[str]) -> float:
    """Points above the picture that a legend of these labels takes."""
    return 12.0 + 12.5 * math.ceil(len(labels) / _legend_columns(labels))


def legend(figure: Figure, axes: Axes) -> None:
    """At the left, where a narrow screen begins."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        spacing = {"borderaxespad": 0.2, "handletextpad": 0.4, "columnspacing": 1.4}
        figure.legend(handles, labels, loc="upper left", ncols=_legend_columns(labels), frameon=False, **spacing)


def lanes_of(bands: Sequence[Band], far: float) -> list[list[Band]]:
    """Bands of one format (the first word of the label) side by side; the narrowest format first."""
    lanes: dict[str, list[Band]] = {}
    for band in bands:
        if -far <= band.low < band.high <= far:
            lanes.setdefault(format_in(band), []).append(band)
    return sorted(lanes.values(), key=_extent)


def format_in(band: Band) -> str:
    """The format that a band speaks of."""
    return band.label.partition(" ")[0]


def _extent(lane: Sequence[Band]) -> float:
    return max(band.high for band in lane) - min(band.low for band in lane)


def limits_of(values: Iterable[float], lanes: Sequence[Sequence[Band]], scale: Scale) -> tuple[float, float]:
    """All values and the whole of the narrowest format; wider formats reach beyond the picture."""
    points = [x for x in values if abs(x) <= scale.far]
    points += [edge for band in (lanes[0] if lanes else ()) for edge in (band.low, band.high)]
    low, high = (min(points), max(points)) if points else (-1.0, 1.0)
    margin = max(0.03 * (high - low), scale.least(low, high))
    return low - margin, high + margin


def shade(axes: Axes, lanes: Sequence[Sequence[Band]]) -> None:
    """The narrowest format in colour, what lies outside it in red, and the edges of the others as dashes."""
    if not lanes:
        return
    axes.set_facecolor(OUTSIDE)
    for colour, band in _coloured(lanes[0], 0):
        axes.axvspan(band.low, band.high, facecolor="white", edgecolor="none", zorder=0)
        axes.axvspan(band.low, band.high, facecolor=colour, alpha=0.35, edgecolor="none", zorder=0)
    low, high = axes.get_xlim()
    for edge in sorted({edge for lane in lanes for band in lane for edge in (band.low, band.high)}):
        if low < edge < high:
            axes.axvline(edge, color="#666666", linewidth=0.6, linestyle=(0, (3, 3)), zorder=0.5)


def _coloured(lane: Sequence[Band], index: int) -> Iterator[tuple[str, Band]]:
    """The widest band of a lane has the lane's main colour."""
    main, other = BAND_COLOURS[min(index, len(BAND_COLOURS) - 1)]
    widest = max(lane, key=lambda band: band.high - band.low)
    for band in lane:
        yield (main if band is widest else other), band


def draw_strips(figure: Figure, axes: Axes, lanes: Sequence[Sequence[Band]], scale: Scale) -> None:
    """The formats as labelled strips above the rows, on the same x axis."""
    box = axes.get_position()
    low, high = axes.get_xlim()
    unit = STRIP / (figure.get_figheight() * 72)
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
            span = f"{scale.tell(band.low)} … {scale.tell(band.high)}"
            name = clean(band.label)
            room = (shown_high - shown_low) * points / (0.56 * (FONT - 1.5))
            label = next((text for text in (f"{name}: {span}", name, name.split(" ")[-1]) if len(text) < room), "")
            strip.text((shown_low + shown_high) / 2, 0.46, label, ha="center", va="center", fontsize=FONT - 1.5)
