"""A picture as data: frozen, plain Python, without a word about how it is drawn. `ampcheck.record` gives them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
