"""Charts as inline SVG and tables: the same text for the same chart, readable at any width and in dark mode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from ampcheck.core.run import Band, Chart, Marker, Series
from ampcheck.report.magnitudes import COLOURS, LABEL_LENGTH, axis_over, range_legend, range_table
from ampcheck.report.scales import DRAWABLE, Scale, scale_over
from ampcheck.report.svg import markup, node, percent
from ampcheck.report.text import clean, number, shorten_middle

if TYPE_CHECKING:
    from markupsafe import Markup

_HEIGHT = 230
_UNITS = 1000
"""Units of a drawing in each direction, which is stretched to the size of the chart."""

_MARKER_LENGTH = 26
_POINTS = 30
"""Up to so many points of a line have dots."""

_NEAR = 0.01
"""Lines closer than this part of the chart's height cannot be distinguished."""


def draw_chart(chart: Chart) -> Markup:
    """`chart` as a legend and a drawing. Values that are not finite become marks at the edge (`range`) or gaps."""
    if chart.kind == "range":
        return markup(*_legend(range_legend(chart)), range_table(chart))
    drawing, names = _histogram(chart) if chart.kind == "histogram" else _line(chart)
    drawing.set("role", "img")
    drawing.set("aria-label", clean(f"{chart.title}. {describe_chart(chart)}"))
    axes = [node("p", text=chart.y_label, class_="axis y")] if chart.y_label else []
    below = [node("p", text=chart.x_label, class_="axis x")] if chart.x_label else []
    return markup(*_legend(names), *axes, node("div", drawing, class_="plot"), *below)


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


def _legend(names: Sequence[tuple[str, str]]) -> Iterator[Element]:
    """The names of what is drawn, each with its style."""
    if names:
        yield node("ul", *(node("li", _key(style), node("span", text=name)) for style, name in names), class_="legend")


def _key(style: str) -> Element:
    line = node("line", x1=0, x2="100%", y1="50%", y2="50%", class_=style)
    box = node("rect", width="100%", height="100%", class_=style)
    return node("svg", box if style in ("band", "out") else line, class_="key", aria_hidden="true")


def _canvas(x: Scale, y: Scale) -> Element:
    """A drawing with a grid and labels at its axes."""
    canvas = node("svg", width="100%", height=_HEIGHT)
    for share, label in y.ticks(5):
        place = percent(1 - share)
        canvas.append(node("line", x1=0, x2="100%", y1=place, y2=place, class_="grid"))
        canvas.append(node("text", x=-7, y=place, dy=4, text_anchor="end", text=label))
    for index, (share, label) in enumerate(x.ticks(8)):
        name = {"class": "odd"} if index % 2 else {}
        canvas.append(node("line", x1=percent(share), x2=percent(share), y1=0, y2="100%", class_="grid"))
        canvas.append(node("text", x=percent(share), y=_HEIGHT + 16, text_anchor="middle", text=label, **name))
    return canvas


def _stretched(*paths: Element) -> Element:
    """Paths in `_UNITS`, stretched over the drawing; their strokes keep their width."""
    box = f"0 0 {_UNITS} {_UNITS}"
    return node("svg", *paths, viewBox=box, preserveAspectRatio="none", width="100%", height="100%")


# Lines ---------------------------------------------------------------------------------------------------------------


def _line(chart: Chart) -> tuple[Element, list[tuple[str, str]]]:
    """Series over x, and their names. A label has one colour in all its groups; a series without a group is solid."""
    x, y = _line_scales(chart)
    canvas = _canvas(x, y)
    _shade(canvas, x, chart.bands)
    groups = sorted(dict.fromkeys(series.group for series in chart.series), key=bool)
    labels = list(dict.fromkeys(series.label for series in chart.series))
    lines = [list(zip(series.x, series.y, strict=True)) for series in chart.series]
    paths, dots, names = [], [], []
    for index, series in enumerate(chart.series):
        style = f"c{labels.index(series.label) % COLOURS} g{groups.index(series.group) % 4}"
        if series.low:
            area = [*zip(series.x, series.low, strict=True), *reversed([*zip(series.x, series.high, strict=True)])]
            if all(abs(value) < DRAWABLE for point in area for value in point):
                paths.append(node("path", d=_path(area, x, y) + "Z", class_=f"area {style}"))
        path = node("path", d=_path(_thinned(lines[index], x), x, y), class_=style)
        if covering := _covering(index, lines, y):
            path.set("style", f"stroke-width:{1.6 + 1.4 * covering:g}")
        paths.append(path)
        drawn = [point for point in lines[index] if _drawable(point, x, y)]
        if len(drawn) <= _POINTS:
            place = [(percent(x.share(a)), percent(1 - y.share(b))) for a, b in drawn]
            dots += [node("circle", cx=a, cy=b, r=2.5, class_=style) for a, b in place]
        name = " ".join(part for part in (series.label, series.group) if part)
        names += [(style, shorten_middle(name, LABEL_LENGTH))] if name else []
    canvas.append(_stretched(*paths))
    canvas.extend(dots)
    if not any(_drawable(point, x, y) for line in lines for point in line):
        canvas.append(node("text", x="50%", y="50%", text_anchor="middle", text="no finite values"))
    names += [("band", band.label) for band in chart.bands]
    return canvas, names + _draw_markers(canvas, x, chart.markers)


def _line_scales(chart: Chart) -> tuple[Scale, Scale]:
    """The axes as the chart requires; by default a wide range of values gets a logarithmic axis."""
    xs = [float(v) for s in chart.series for v in s.x]
    ys = [float(v) for s in chart.series for v in (*s.y, *s.low, *s.high) if abs(v) < DRAWABLE]
    markers = [marker.x for marker in chart.markers]
    finite = [v for v in (*xs, *markers) if abs(v) < DRAWABLE]
    whole = not chart.x_scale and all(v.is_integer() for v in xs if math.isfinite(v))  # steps have no halves
    wide = bool(ys) and min(ys) > 0 and max(ys) / min(ys) > 1e3
    kind = chart.y_scale or ("log" if wide else "linear")
    room = 0.0 if kind == "log" else 0.04
    y = scale_over(ys, kind, margin=room)
    if chart.markers and kind == "linear":  # room for the labels above the lines
        y = Scale(y.low, y.high + 0.4 * (y.high - y.low), kind)
    return scale_over(finite, chart.x_scale or "linear", whole=whole), y


def _drawable(point: tuple[float, float], x: Scale, y: Scale) -> bool:
    positive = (x.kind != "log" or point[0] > 0) and (y.kind != "log" or point[1] > 0)
    return positive and abs(point[0]) < DRAWABLE and abs(point[1]) < DRAWABLE


def _path(points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    """The line through the points that can be drawn; the others are gaps."""
    parts, pen = [], "M"
    for point in points:
        if _drawable(point, x, y):
            parts.append(f"{pen}{round(_UNITS * x.share(point[0]))} {round(_UNITS * (1 - y.share(point[1])))}")
            pen = "L"
        else:
            pen = "M"
    return "".join(parts) or "M0 0"


def _thinned(points: Sequence[tuple[float, float]], x: Scale) -> Sequence[tuple[float, float]]:
    """Of more points than a screen has columns, the first, lowest, highest and last of each column."""
    if len(points) <= 4 * _UNITS:
        return points
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(round(_UNITS / 2 * x.share(point[0])) if math.isfinite(point[0]) else -1, []).append(point)
    kept: list[tuple[float, float]] = []
    for column in columns.values():
        order = {0, len(column) - 1}
        known = [index for index, (_, value) in enumerate(column) if not math.isnan(value)]
        gaps = [index for index, (_, value) in enumerate(column) if math.isnan(value)][:1]
        for extreme in (min, max):
            order |= {extreme(known, key=lambda index: column[index][1])} if known else set()
        kept += [column[index] for index in sorted(order | set(gaps))]
    return kept


def _covering(index: int, lines: Sequence[Sequence[tuple[float, float]]], y: Scale) -> int:
    """Return how many later lines are drawn on top of this one; it is drawn wider, so that it shows at both sides."""
    near, line = _NEAR * (y.high - y.low), lines[index]

    def covers(other: Sequence[tuple[float, float]]) -> bool:
        pairs = zip(line, other, strict=False)
        alike = all(a[0] == b[0] and (a[1] == b[1] or abs(a[1] - b[1]) <= near) for a, b in pairs)
        return alike and len(line) == len(other) > 0

    return sum(map(covers, lines[index + 1 :]))


def _shade(canvas: Element, x: Scale, bands: Sequence[Band]) -> None:
    for band in bands:
        left, right = x.share(band.low), x.share(band.high)
        if math.isfinite(band.low) and math.isfinite(band.high) and left < right:
            place = {"x": percent(left), "width": percent(right - left)}
            canvas.append(node("rect", y=0, height="100%", class_="band", **place))


def _draw_markers(canvas: Element, x: Scale, markers: Sequence[Marker]) -> list[tuple[str, str]]:
    """Labelled vertical lines, and the names of their groups."""
    shown = [marker for marker in markers if abs(marker.x) < DRAWABLE]
    groups = list(dict.fromkeys(marker.group for marker in shown))
    for marker in shown:
        index = groups.index(marker.group)
        text = shorten_middle(marker.label, _MARKER_LENGTH)
        side = {"y": 10} if index % 2 else {"y": -4}
        anchor = "rotate(-90)"
        words = node("text", x=-4, text_anchor="end", transform=anchor, text=text, **side)
        line = node("line", x1=0, x2=0, y1=0, y2=_HEIGHT, class_=f"marker m{index % 3}")
        canvas.append(node("svg", line, words, x=percent(x.share(marker.x)), width=1, class_="open"))
    return [(f"marker m{index % 3}", group) for index, group in enumerate(groups) if group]


# Histograms ----------------------------------------------------------------------------------------------------------


def _histogram(chart: Chart) -> tuple[Element, list[tuple[str, str]]]:
    """Each series as a filled outline, the formats behind it."""
    axis = axis_over((x for series in chart.series for x in series.x), chart.bands, chart.scale)
    counts = [count for series in chart.series for count in series.y if abs(count) < DRAWABLE]
    y = scale_over([0.0, 1.06 * max([*counts, 0.0]) or 1.0], "linear")
    canvas = _canvas(axis.scale, y)
    for lane in axis.lanes[:1]:
        _shade(canvas, axis.scale, lane)
    paths, names = [], []
    for index, series in enumerate(chart.series):
        style = f"c{index % COLOURS}"
        paths.append(node("path", d=_stairs(series, axis.scale, y), class_=f"area {style}"))
        paths.append(node("path", d=_stairs(series, axis.scale, y), class_=style))
        names.append((style, shorten_middle(series.label, LABEL_LENGTH)))
    canvas.append(_stretched(*paths))
    bands = [f"{band.label}: {axis.name(band.low)} … {axis.name(band.high)}" for lane in axis.lanes for band in lane]
    return canvas, [*((style, name) for style, name in names if name), *(("band", name) for name in bands)]


def _stairs(series: Series, x: Scale, y: Scale) -> str:
    if not series.y:
        return "M0 0"
    edges = [round(_UNITS * x.share(edge), 1) for edge in series.x]
    parts = [f"M{edges[0]:g} {_UNITS}"]
    for count, right in zip(series.y, edges[1:], strict=True):
        height = round(_UNITS * (1 - y.share(count if abs(count) < DRAWABLE else 0.0)), 1)
        parts.append(f"V{height:g}H{right:g}")
    return "".join([*parts, f"V{_UNITS}"])
