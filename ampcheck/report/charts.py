"""`Chart` -> inline SVG, drawn by matplotlib without pyplot, the same bytes for the same chart."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from ampcheck.errors import UsageError
from ampcheck.record import Band, Chart, Marker, Series
from ampcheck.report.scales import SCALES, Scale
from ampcheck.report.text import clean, number, shorten_middle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 680.0
"""Width of every chart in points: the unit in which everything below is measured."""

_COLOURS = ("#0068ad", "#d55e00", "#007f5f", "#a8437f", "#7a5c00", "#444444", "#3f9fd8", "#b00020")  # after Okabe-Ito
_BAND_COLOURS = (("#cfe3d4", "#f2e2b3"), ("#d5dcec", "#e6d9ea"), ("#e0e0e0", "#eeeeee"))
_OUTSIDE = "#fbe9e7"
_ALARM = "#b00020"
_LABEL_LENGTH = 40
_MARKER_LENGTH = 26
_FONT = 8.5
_STRIP = 15.0
_STYLE = {
    "svg.fonttype": "none",  # text stays text: small, searchable, read aloud
    "text.parse_math": False,  # a module path with a dollar sign is no formula
    "font.family": "sans-serif",
    "font.size": _FONT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "grid.color": "#00000022",
    "grid.linewidth": 0.5,
}


def chart_svg(chart: Chart, *, key: str = "chart") -> str:
    """`chart` as an `<svg>` element for a page; `key` keeps its ids apart from those of the page's other charts.

    Values that are not finite are drawn as marks at the edge (`range`) or as gaps (`line`). Raises `UsageError` for an
    unknown kind.
    """
    from matplotlib import style

    drawers = {"range": _draw_range, "line": _draw_line}
    if chart.kind not in drawers:
        raise UsageError(f"a chart must be of kind {' or '.join(drawers)}, not {chart.kind!r}")
    if chart.scale not in SCALES:
        raise UsageError(f"the scale of a chart must be {' or '.join(SCALES)}, not {chart.scale!r}")
    with style.context(["default", {**_STYLE, "svg.hashsalt": key}]), _without_warnings():
        figure = drawers[chart.kind](chart)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _inline(stream.getvalue(), f"{chart.title}. {describe_chart(chart)}")


def describe_chart(chart: Chart) -> str:
    """What the picture shows, in words, for those who cannot see it."""
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


def _draw_range(chart: Chart) -> Figure:
    """Rows of modules: a thin line from smallest to largest, a thick one from p05 to p95, a dot at the median."""
    rows = list(dict.fromkeys(series.label for series in chart.series))
    groups = list(dict.fromkeys(series.group for series in chart.series))
    scale = SCALES[chart.scale]
    lanes = _lanes(chart.bands, scale.far)
    low, high = _limits(chart, lanes, scale)
    prefix = _common_prefix(rows)
    names = [shorten_middle(clean(row[len(prefix) :]), _LABEL_LENGTH) or "(root)" for row in rows]

    marks: dict[str, list[tuple[float, float]]] = {scale.below: [], "inf": [], "NaN": []}
    outside = f"outside {clean(_format(lanes[0][0]))}" if lanes else ""
    longest = max([len(name) for name in names], default=0)
    left = 14 + max(longest, 16) * _FONT * 0.6
    pitch = 9.0 if len(groups) < 2 else 7.0 * len(groups) + 2
    height = max(len(rows), 1) * pitch
    strips = _STRIP * len(lanes)
    figure, axes = _canvas(
        left=left,
        top=_legend_height([*groups, *_marks_in(chart, scale), outside]) + strips,
        inner_height=height,
        bottom=34,
    )
    axes.set_xlim(low, high)
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)

    _shade(axes, lanes)
    axes.hlines([row + 0.5 for row in range(len(rows) - 1)], low, high, colors="white", linewidth=1.0)
    for index, group in enumerate(groups):
        shift = (index - (len(groups) - 1) / 2) * 7.0 / pitch
        members = [(rows.index(s.label) + shift, s.x) for s in chart.series if s.group == group]
        _draw_rows(axes, members, _COLOURS[index % len(_COLOURS)], clean(group), marks)
    for (name, points), marker in zip(marks.items(), "<>x", strict=True):
        if points:  # not finite, or zero as an exponent: drawn at the edge, as there is no place beyond it
            mark: dict[str, Any] = {
                "marker": marker,
                "markersize": 4.5,
                "color": "#333333" if marker == "<" else _ALARM,
            }
            axes.plot(*_columns(points), linestyle="", clip_on=False, zorder=5, label=name, **mark)
    if lanes:
        axes.fill_between([], [], facecolor=_OUTSIDE, edgecolor="#c9a19c", label=outside)
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
    _draw_strips(figure, axes, lanes, scale)
    _legend(figure, axes)
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


def _lanes(bands: Sequence[Band], far: float) -> list[list[Band]]:
    """Bands of one format (the first word of the label) side by side; the narrowest format first."""
    lanes: dict[str, list[Band]] = {}
    for band in bands:
        if -far <= band.low < band.high <= far:
            lanes.setdefault(_format(band), []).append(band)
    return sorted(lanes.values(), key=_extent)


def _format(band: Band) -> str:
    return band.label.partition(" ")[0]


def _extent(lane: Sequence[Band]) -> float:
    return max(band.high for band in lane) - min(band.low for band in lane)


def _limits(chart: Chart, lanes: Sequence[Sequence[Band]], scale: Scale) -> tuple[float, float]:
    """All values and the whole of the narrowest format; wider formats reach beyond the picture."""
    points = [x for series in chart.series for x in series.x if abs(x) <= scale.far]
    points += [edge for band in (lanes[0] if lanes else ()) for edge in (band.low, band.high)]
    low, high = (min(points), max(points)) if points else (-1.0, 1.0)
    margin = max(0.03 * (high - low), scale.least(low, high))
    return low - margin, high + margin


def _shade(axes: Axes, lanes: Sequence[Sequence[Band]]) -> None:
    if not lanes:
        return
    axes.set_facecolor(_OUTSIDE)
    for colour, band in _coloured(lanes[0], 0):
        axes.axvspan(band.low, band.high, facecolor="white", edgecolor="none", zorder=0)
        axes.axvspan(band.low, band.high, facecolor=colour, alpha=0.35, edgecolor="none", zorder=0)
    low, high = axes.get_xlim()
    for edge in sorted({edge for lane in lanes for band in lane for edge in (band.low, band.high)}):
        if low < edge < high:
            axes.axvline(edge, color="#666666", linewidth=0.6, linestyle=(0, (3, 3)), zorder=0.5)


def _coloured(lane: Sequence[Band], index: int) -> Iterator[tuple[str, Band]]:
    """The widest band of a lane has the lane's main colour."""
    main, other = _BAND_COLOURS[min(index, len(_BAND_COLOURS) - 1)]
    widest = max(lane, key=lambda band: band.high - band.low)
    for band in lane:
        yield (main if band is widest else other), band


def _draw_strips(figure: Figure, axes: Axes, lanes: Sequence[Sequence[Band]], scale: Scale) -> None:
    """The formats as labelled strips above the rows, on the same x axis."""
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
            span = f"{scale.tell(band.low)} … {scale.tell(band.high)}"
            name = clean(band.label)
            room = (shown_high - shown_low) * points / (0.56 * (_FONT - 1.5))
            label = next((text for text in (f"{name}: {span}", name, name.split(" ")[-1]) if len(text) < room), "")
            strip.text((shown_low + shown_high) / 2, 0.46, label, ha="center", va="center", fontsize=_FONT - 1.5)


def _draw_line(chart: Chart) -> Figure:
    from matplotlib.ticker import MaxNLocator

    lines = [(series.group, *_paired(series)) for series in chart.series]
    names = [
        shorten_middle(clean(" ".join(part for part in (series.label, series.group) if part)), _LABEL_LENGTH)
        for series in chart.series
    ]
    figure, axes = _canvas(left=58, top=_legend_height([*names, *_legend_extra(chart)]), inner_height=230, bottom=36)
    for band in chart.bands:
        if math.isfinite(band.low) and math.isfinite(band.high):
            axes.axvspan(band.low, band.high, facecolor="#e8e8e8", edgecolor="none", zorder=0, label=clean(band.label))
    groups = list(dict.fromkeys(series.group for series in chart.series))
    for index, (name, (group, x, y)) in enumerate(zip(names, lines, strict=True)):
        look: dict[str, Any] = {"linewidth": 1.4, "marker": "o" if len(x) <= 30 else None, "markersize": 3}
        dashes = ("-", "--", ":", "-.")[groups.index(group) % 4]
        colour = _COLOURS[index % len(_COLOURS)]
        axes.plot(x, y, color=colour, linestyle=dashes, label=name or "_", **look)
        _draw_interval(axes, chart.series[index], colour)
    values = [value for _, _, y in lines for value in y if math.isfinite(value)]
    if values and min(values) > 0 and max(values) / min(values) > 1e3:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: number(value))
        axes.minorticks_off()
    elif not values:
        axes.text(0.5, 0.5, "no finite values", transform=axes.transAxes, ha="center", color="#666666")
    if all(value.is_integer() for _, x, _ in lines for value in map(float, x)):  # steps have no halves
        axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, steps=[1, 2, 2.5, 5, 10]))
    if len(places := {value for _, x, _ in lines for value in x if math.isfinite(value)}) == 1:
        axes.set_xlim(min(places) - 1, min(places) + 1)  # a single place has no width of its own
    axes.grid()
    _draw_markers(axes, chart.markers)
    axes.set_xlabel(clean(chart.x_label))
    axes.set_ylabel(clean(chart.y_label))
    _legend(figure, axes)
    return figure


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
        colour, dashes = (_ALARM, "#444444", *_COLOURS)[place % 10], ("-", (0, (4, 3)), ":")[place % 3]
        name = "_" if marker.group in named else clean(marker.group) or "_"
        named.add(marker.group)
        axes.axvline(marker.x, color=colour, linewidth=1.1, linestyle=dashes, zorder=1.5, label=name)
        side: dict[str, Any] = {"ha": "left" if place % 2 else "right", "va": "top", "rotation": 90}
        where: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        label = shorten_middle(clean(marker.label), _MARKER_LENGTH)
        offset = (2.0 if place % 2 else -1.5, -2)
        axes.annotate(label, (marker.x, 1), offset, fontsize=_FONT - 1.5, color=colour, **side, **where)


def _paired(series: Series) -> tuple[list[float], list[float]]:
    """x and y of the same length; what is not finite, or too large to be drawn, becomes a gap."""
    pairs = list(zip(series.x, series.y, strict=False))
    gap = math.nan
    return [x if abs(x) < 1e300 else gap for x, _ in pairs], [y if abs(y) < 1e300 else gap for _, y in pairs]


def _canvas(*, left: float, top: float, inner_height: float, bottom: float) -> tuple[Figure, Axes]:
    """A figure whose margins are given in points, so that a taller chart keeps the size of its text."""
    from matplotlib.figure import Figure

    height = top + inner_height + bottom
    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, facecolor="none")
    axes = figure.add_axes((left / WIDTH, bottom / height, (WIDTH - left - 12) / WIDTH, inner_height / height))
    return figure, axes


def _legend_columns(labels: Sequence[str]) -> int:
    widest = max([len(label) for label in labels], default=0) * _FONT * 0.56 + 32
    return max(1, min(len(labels), int((WIDTH - 20) / widest)))


def _legend_height(labels: Sequence[str]) -> float:
    return 12.0 + 12.5 * math.ceil(len(labels) / _legend_columns(labels))


def _legend(figure: Figure, axes: Axes) -> None:
    """At the left, where a narrow screen begins."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        spacing = {"borderaxespad": 0.2, "handletextpad": 0.4, "columnspacing": 1.4}
        figure.legend(handles, labels, loc="upper left", ncols=_legend_columns(labels), frameon=False, **spacing)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """A glyph that matplotlib's own font lacks is the browser's business: the text stays text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _inline(svg: str, description: str) -> str:
    """The `<svg>` of a document for use inside HTML: no namespaces, no fixed size, only ids that are referred to."""
    root = ElementTree.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", svg))
    used = set(re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", svg))
    kept = {name for pair in used for name in pair if name}
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(key): value for key, value in element.attrib.items() if key != "id" or value in kept}
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag in ("metadata", "style")]:
            parent.remove(child)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib |= {"role": "img", "aria-label": clean(description), "stroke-linejoin": "round"}
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: Any) -> str:
    return str(name).rpartition("}")[2]
