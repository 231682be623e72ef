"""Values on an axis of magnitudes, with the range of the formats behind them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from xml.etree.ElementTree import Element

from ampcheck.core.run import Band, Chart
from ampcheck.report.scales import DRAWABLE, Scale, power_of_two, scale_over
from ampcheck.report.svg import node, percent
from ampcheck.report.text import number, shorten_middle

LABEL_LENGTH = 60
COLOURS = 8
"""Colours of series; the style sheet names them `c0` and so on."""

_FAR = 2000.0
"""Exponents beyond all of float64."""

_ROW = 11
_LANE = 16


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of magnitudes. lanes: the bands of each format, the narrowest format first; it lies on the axis whole."""

    scale: Scale
    lanes: tuple[tuple[Band, ...], ...] = ()

    @property
    def format(self) -> str:
        """The narrowest format; empty without bands."""
        return _format_of(self.lanes[0][0]) if self.lanes else ""

    def at(self, value: float) -> str:
        """The position of a value, in percent."""
        return percent(self.scale.share(value))

    def name(self, value: float) -> str:
        """A value on the axis as text."""
        return power_of_two(value) if self.scale.kind == "exponent" else number(value)

    @property
    def background(self) -> str:
        """The narrowest format as a CSS background: what lies outside it, at its thin end, and in its full range."""
        if not self.lanes:
            return "none"
        stops, reached = [], "0%"
        for band in self.lanes[0]:
            low, high = self.at(band.low), self.at(band.high)
            stops += [f"var(--out) {reached} {low}", f"var(--{_part(band, self.lanes[0])}) {low} {high}"]
            reached = high
        return f"linear-gradient(90deg,{','.join([*stops, f'var(--out) {reached} 100%'])})"

    def head(self) -> Element:
        """The names of the formats above the axis, and its ticks."""
        height = _LANE * len(self.lanes) + 16
        top = node("svg", class_="scale", width="100%", height=height, aria_hidden="true")
        for index, lane in enumerate(reversed(self.lanes)):
            for band in lane:
                left, right = self.scale.share(band.low), self.scale.share(band.high)
                if left < right:
                    title = f"{band.label}: {self.name(band.low)} … {self.name(band.high)}"
                    fill = _part(band, lane) if lane is self.lanes[0] else "wider"
                    box = node("rect", width="100%", height=_LANE - 3, class_=fill)
                    short = band.label.rpartition(" ")[2] if fill == "thin" else title
                    words = node("text", x=4, y=_LANE - 6, text=short)
                    place = {"x": percent(left), "width": percent(right - left)}
                    drawn = node("title", text=title), box, words
                    top.append(node("svg", *drawn, y=index * _LANE, height=_LANE - 3, **place))
        for index, (share, label) in enumerate(self.scale.ticks(9)):
            anchor = "start" if share < 0.02 else "end" if share > 0.98 else "middle"
            place = {"class": "tick odd" if index % 2 else "tick", "text_anchor": anchor}
            top.append(node("text", x=percent(share), y=height - 4, text=label, **place))
        return top


def axis_over(values: Iterable[float], bands: Sequence[Band], kind: str = "exponent") -> Axis:
    """The axis that shows all values and the narrowest format; wider formats reach beyond it."""
    far = _FAR if kind == "exponent" else DRAWABLE
    lanes: dict[str, list[Band]] = {}
    for band in bands:
        if -far <= band.low < band.high <= far:
            lanes.setdefault(_format_of(band), []).append(band)
    ordered = sorted(lanes.values(), key=lambda lane: max(b.high for b in lane) - min(b.low for b in lane))
    edges = [edge for band in (ordered[0] if ordered else ()) for edge in (band.low, band.high)]
    scale = scale_over([*(v for v in values if abs(v) <= far), *edges], kind, margin=0.03)
    return Axis(scale, tuple(tuple(sorted(lane, key=lambda band: band.low)) for lane in ordered))


def _format_of(band: Band) -> str:
    return band.label.partition(" ")[0]


def _part(band: Band, lane: Sequence[Band]) -> str:
    """The colour of a band: the widest of its format is the full range."""
    return "fits" if band is max(lane, key=lambda other: other.high - other.low) else "thin"


def strip(axis: Axis, rows: Sequence[tuple[str, Sequence[float]]], label: str) -> Element:
    """Rows of values, each with a colour: a thin line from smallest to largest, a thick one from the 5th to the 95th
    percentile, a dot at the median or at the only one; what is not finite is a mark at the edge. label: for screen
    readers, empty where the text beside it says the same."""
    names = {"role": "img", "aria_label": label} if label else {"aria_hidden": "true"}
    picture = node("svg", class_="strip", height=_ROW * max(len(rows), 1), **names)
    for index, (colour, values) in enumerate(rows):
        picture.extend(_marks(axis, colour, values, (index + 0.5) * _ROW))
    return picture


def _marks(axis: Axis, colour: str, values: Sequence[float], y: float) -> Iterator[Element]:
    known = [value for value in values if not math.isnan(value)]
    finite = [value for value in known if abs(value) < DRAWABLE]
    inside = [axis.at(value) for value in known]
    if finite:
        yield node("line", x1=inside[0], x2=inside[-1], y1=y, y2=y, class_=colour)
    if finite and len(inside) == len(values) == 5:
        yield node("line", x1=inside[1], x2=inside[3], y1=y, y2=y, class_=f"{colour} thick")
    if finite and len(inside) == len(values) and len(values) in (1, 5):
        yield node("circle", cx=inside[len(inside) // 2], cy=y, r=2.5, class_=colour)
    edges = (("◂", "0%", "start", -math.inf in known), ("▸", "100%", "end", math.inf in known))
    for mark, x, anchor, there in edges:
        if there:
            yield node("text", x=x, y=y + 4, text_anchor=anchor, class_="edge" if mark == "▸" else "", text=mark)
    if len(known) < len(values):
        yield node("text", x="99%", y=y + 4, text_anchor="end", class_="edge", text="✕")


def describe_values(axis: Axis, values: Sequence[float]) -> str:
    """Five values in words."""
    if len(values) != 5:
        return ", ".join(map(axis.name, values)) or "no values"
    low, _, middle, _, high = map(axis.name, values)
    return f"{low} to {high}, median {middle}"


def range_table(chart: Chart) -> Element:
    """A range chart as a table: a row for each label, with a strip of its groups."""
    axis = axis_over((x for series in chart.series for x in series.x), chart.bands, chart.scale)
    rows = list(dict.fromkeys(series.label for series in chart.series))
    groups = list(dict.fromkeys(series.group for series in chart.series))
    prefix = _common_prefix(rows)
    body = node("tbody")
    for row in rows:
        members = [series for series in chart.series if series.label == row]
        name = shorten_middle(row[len(prefix) :], LABEL_LENGTH) or "(root)"
        drawn = [(f"c{groups.index(series.group) % COLOURS}", series.x) for series in members]
        words = "; ".join(f"{series.group} {describe_values(axis, series.x)}".strip() for series in members)
        picture = node("td", strip(axis, drawn, words))
        body.append(node("tr", node("th", text=name, scope="row"), picture))
    caption = node("th", text=prefix or chart.y_label or "row", scope="col")
    head = node("thead", node("tr", caption, node("th", axis.head(), node("span", text=chart.x_label), scope="col")))
    return node("table", head, body, class_="ranges", style=f"--axis:{axis.background}")


def _common_prefix(rows: Sequence[str]) -> str:
    """The dotted path that all rows share, which is written once above them."""
    if len(rows) < 2:
        return ""
    parts = [row.split(".")[:-1] for row in rows]
    shared = takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))
    return "".join(f"{names[0]}." for names in shared)


def range_legend(chart: Chart) -> list[tuple[str, str]]:
    """Return what the colours and marks of a range chart mean: style class and text."""
    groups = list(dict.fromkeys(series.group for series in chart.series))
    values = [value for series in chart.series for value in series.x]
    axis = axis_over((), chart.bands, chart.scale)
    below = "zero" if chart.scale == "exponent" else "-inf"
    named = [(f"c{index % COLOURS}", group) for index, group in enumerate(groups) if group]
    named += [("out", f"outside {axis.format}")] if axis.lanes else []
    named += [("none", f"◂ {below}")] if -math.inf in values else []
    named += [("none", "▸ inf")] if math.inf in values else []
    return named + ([("none", "✕ NaN")] if any(map(math.isnan, values)) else [])
