"""Charts as data, in a `Run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ampcheck.core.errors import UsageError

KINDS = ("histogram", "range", "line")
SCALES = ("exponent", "linear")
AXES = ("", "linear", "log", "exponent")


@dataclass(frozen=True, slots=True)
class Series:
    """One line or one row of a chart; `group` names its family (forward, backward).

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
    """A named interval of the x axis, such as the normal range of float16."""

    label: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Marker:
    """An event on the x axis of a line chart; `group` names its family in the legend."""

    label: str
    x: float
    group: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart as data.

    kind `line`: each series has x and y. kind `range`: each series is one row, its x being five values in
    rising order: smallest, 5th percentile, median, 95th percentile, largest. kind `histogram`: each series has n + 1
    rising edges as x and n counts as y.

    scale, of a range chart or histogram: whether its x values are exponents of two (`exponent`: 3 is 8 and minus
    infinity is 0) or the values themselves (`linear`). x_scale, y_scale, of a line chart: `linear`, `log` (values on a
    logarithmic axis) or `exponent`; empty is linear for x, and is chosen by the values for y.

    Raises `UsageError` for an unknown kind or scale, and for a series that does not fit the kind.
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

    def __post_init__(self) -> None:
        for name, known in (("kind", KINDS), ("scale", SCALES), ("x_scale", AXES), ("y_scale", AXES)):
            if getattr(self, name) not in known:
                valid = " or ".join(choice or "empty" for choice in known)
                raise UsageError(f"the {name} of a chart must be {valid}, not {getattr(self, name)!r:.40}")
        for series in self.series:
            label, x, y = f"the series {series.label!r:.40}", series.x, series.y
            if self.kind == "range" and len(x) > 5:
                raise UsageError(f"{label} must have at most five values; it has {len(x)}")
            if self.kind == "line" and not (len(x) == len(y) and {len(series.low), len(series.high)} <= {0, len(x)}):
                raise UsageError(f"{label} must have as many y, low and high as x; it has {len(x)} x and {len(y)} y")
            if self.kind == "histogram" and (x or y):
                if len(x) != len(y) + 1:
                    raise UsageError(f"{label} must have an edge more than counts; it has {len(x)} and {len(y)}")
                if not all(left < right for left, right in pairwise(x)) or not all(abs(edge) < 1e300 for edge in x):
                    raise UsageError(f"{label} must have finite edges in rising order")
