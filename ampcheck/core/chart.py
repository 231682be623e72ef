"""A picture as data: frozen, plain Python, without a word about how it is drawn. `ampcheck.core.run` gives them out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

KINDS = ("histogram", "range", "line")
SCALES = ("exponent", "linear")
AXES = ("", "linear", "log", "exponent")


@dataclass(frozen=True, slots=True)
class Series:
    """One line or one row of a chart; `group` tells families of series apart (forward, backward).

    low, high: the interval of each y of a line, drawn as a band around it; empty where there is none.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float] = ()
    group: str = ""
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of the x axis with a name, such as the normal range of float16."""

    label: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Marker:
    """A place on the x axis of a line chart where something happened; `group` tells families apart, as in a legend."""

    label: str
    x: float
    group: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture as data.

    kind `line`: each series has x and y. kind `range`: each series is one row, its x being five values in
    rising order: smallest, 5th percentile, median, 95th percentile, largest. kind `histogram`: each series has n + 1
    rising edges as x and n counts as y.

    scale, of a range chart or histogram: what its x values are, `exponent` (of two: 3 stands for 8 and minus infinity
    for 0) or `linear` (the values themselves). x_scale, y_scale, of a line chart: `linear`, `log` (values on a
    logarithmic axis) or `exponent`; empty is linear for x, and for y whatever suits the values.
    """

    kind: str
    title: str
    x_label: str
    y_label: str = ""
    series: Sequence[Series] = ()
    bands: Sequence[Band] = ()
    check: str = ""
    note: str = ""
    markers: Sequence[Marker] = ()
    scale: str = "exponent"
    x_scale: str = ""
    y_scale: str = ""


def is_number(value: Any) -> bool:
    """Whether `value` is a number that float64 can hold, NaN and infinities included."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) <= sys.float_info.max


def require_known(chart: Chart) -> None:
    """Raise `ValueError` for a kind or a scale that no renderer knows."""
    if chart.kind not in KINDS:
        raise ValueError(f"a chart must be of kind {' or '.join(KINDS)}, not {chart.kind!r:.40}")
    for name, known in (("scale", SCALES), ("x_scale", AXES), ("y_scale", AXES)):
        if getattr(chart, name) not in known:
            valid = " or ".join(word or "empty" for word in known)
            raise ValueError(f"the {name} of a chart must be {valid}, not {getattr(chart, name)!r:.40}")


def require_drawable(chart: Chart) -> None:
    """Raise `ValueError` unless `chart` keeps what the docstrings here promise, so that nothing of it is left out."""
    require_known(chart)
    for series in chart.series:
        label, x, y = f"the series {series.label!r:.40}", series.x, series.y
        if not all(map(is_number, (*x, *y, *series.low, *series.high))):
            raise ValueError(f"{label} must hold numbers alone")
        if chart.kind == "range" and len(x) > 5:
            raise ValueError(f"{label} must be at most five values; it has {len(x)}")
        if chart.kind == "line" and not (len(x) == len(y) and {len(series.low), len(series.high)} <= {0, len(x)}):
            raise ValueError(f"{label} must have as many y, low and high as x; it has {len(x)} x and {len(y)} y")
        if chart.kind == "histogram" and (x or y):
            if len(x) != len(y) + 1:
                raise ValueError(f"{label} must have an edge more than counts; it has {len(x)} and {len(y)}")
            if not all(left < right for left, right in pairwise(x)) or not all(abs(edge) < 1e300 for edge in x):
                raise ValueError(f"{label} must have finite edges in rising order")
