"""Charts as inline SVG, drawn by matplotlib without pyplot: the same bytes for the same chart."""

from __future__ import annotations

import io
import math
import re
import warnings
from xml.etree import ElementTree

from ampcheck.core.run import Chart
from ampcheck.report.lines import draw_line
from ampcheck.report.magnitudes import STYLE, draw_histogram, draw_range
from ampcheck.report.text import clean, number

_DRAWERS = {"histogram": draw_histogram, "range": draw_range, "line": draw_line}


def chart_svg(chart: Chart, *, key: str = "chart") -> str:
    """`chart` as an `<svg>` element; charts of one page need different keys, or their ids collide.

    Values that are not finite become marks at the edge (`range`) or gaps (`line`, `histogram`).
    """
    from matplotlib import style

    with style.context(["default", {**STYLE, "svg.hashsalt": key}]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph that matplotlib's font lacks: the browser has its own fonts
        figure = _DRAWERS[chart.kind](chart)
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
