"""The data of a history: points, in series that were measured on one kind of hardware. No torch, no files here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from itertools import pairwise
from statistics import median
from typing import NamedTuple, cast

from ampcheck.core.errors import UsageError, require_schema
from ampcheck.core.json_files import from_plain
from ampcheck.core.run import Scalar, Verdict
from ampcheck.records.speed import VERSIONS, SpeedRecord, changes_between, hardware_key, hardware_of

SCHEMA = 1
"""Version of a line of the history. 1: the first."""


@dataclass(frozen=True, slots=True)
class Times:
    """A benchmark that has a time and no ratio, as pytest-benchmark stores it. seconds: the median."""

    name: str
    seconds: float
    precision: str = ""
    fingerprint: Mapping[str, Scalar] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """This as data for `json.dumps`."""
        return asdict(self)


class SeriesKey(NamedTuple):
    """Fields that the points of a series share, in the order by which series are sorted: ratios first, then by name.

    absolute: its values are seconds, which are not judged.
    """

    absolute: bool
    name: str
    arm: str
    reference: str
    precision: str
    hardware: str
    device: str

    def __str__(self) -> str:
        what = "seconds" if self.absolute else f"{self.arm} against {self.reference}, {self.precision}"
        return f"{self.name} [{what}, {self.device}]"


@dataclass(frozen=True, slots=True)
class Point:
    """One line of the history. time: aware, in UTC. dirty: whether the working tree had changes; None: unknown."""

    time: datetime
    measured: SpeedRecord | Times
    commit: str = ""
    dirty: bool | None = None

    @property
    def absolute(self) -> bool:
        """True if there is a time and no ratio."""
        return isinstance(self.measured, Times)

    @property
    def value(self) -> float:
        """The ratio; of absolute times, seconds."""
        return self.measured.seconds if isinstance(self.measured, Times) else self.measured.ratio

    @property
    def interval(self) -> tuple[float, float]:
        """The ratio's interval; of absolute times, the value twice."""
        if isinstance(self.measured, Times):
            return self.value, self.value
        return self.measured.low, self.measured.high

    @property
    def key(self) -> SeriesKey:
        """The series that this belongs to."""
        measured = self.measured
        device, system, threads = hardware_of(measured.fingerprint).values()
        parts = [device or "unknown device", threads and f"{threads} thread{'' if threads == 1 else 's'}", system]
        arms = ("", "") if isinstance(measured, Times) else (measured.arm, measured.reference)
        hardware = hardware_key(measured.fingerprint, measured.precision)
        shown = ", ".join(str(part) for part in parts if part)
        return SeriesKey(self.absolute, measured.name, *arms, measured.precision, hardware, shown)

    @property
    def commit_text(self) -> str:
        """The first ten digits of the commit, with a + where the working tree had changes."""
        return (self.commit[:10] or "unknown commit") + "+" * bool(self.dirty)

    @property
    def dated(self) -> str:
        """The commit with the day."""
        return f"{self.commit_text} ({self.time:%Y-%m-%d})"

    @property
    def identity(self) -> tuple[str, ...]:
        """All measured values and the commit, which no other measurement shares; not the time of writing.

        Times alone may well be equal, so that those of no known commit need their time as well.
        """
        time = self.time.isoformat() if self.absolute and not self.commit else ""
        return json.dumps(self.measured.to_dict(), sort_keys=True), self.commit, time

    def to_dict(self) -> dict[str, object]:
        """This as data of one line, in a fixed order."""
        kind = "times" if self.absolute else "record"
        return {
            "schema": SCHEMA,
            "time": self.time.astimezone(timezone.utc).isoformat(timespec="microseconds"),
            "commit": self.commit,
            "dirty": self.dirty,
            kind: self.measured.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: object) -> Point:
        """The inverse of `to_dict`. Raises `UsageError` for a newer schema or damaged data."""
        require_schema(data, "this line", "point of ampcheck's history", SCHEMA)
        line = cast("Mapping[str, object]", data)
        try:
            time, commit, dirty = datetime.fromisoformat(cast("str", line["time"])), line["commit"], line["dirty"]
            if time.tzinfo is None or not isinstance(commit, str) or not isinstance(dirty, bool | None):
                raise ValueError("time, commit or dirty is none")
            time = time.astimezone(timezone.utc)  # the first and the last day of the calendar have no other zone
            measured: SpeedRecord | Times
            if "record" in line:
                measured = SpeedRecord.from_dict(line["record"])
            else:
                measured = from_plain(Times, line["times"], frozenset(("precision", "fingerprint")))
        except UsageError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"this line is damaged: {error!r:.300}") from error
        point = cls(time, measured, commit, dirty)
        if not 0 < point.value < float("inf"):
            raise UsageError(f"this line is damaged: a ratio or a time cannot be {point.value!r}")
        return point


@dataclass(frozen=True, slots=True)
class SpeedSeries:
    """The points of one key, in the order in which they were measured; never of two kinds of hardware."""

    key: SeriesKey
    points: tuple[Point, ...]

    @property
    def values(self) -> list[float]:
        """Ratios, or seconds."""
        return [point.value for point in self.points]

    def releases(self) -> list[tuple[int, list[tuple[str, Scalar, Scalar]]]]:
        """Where versions changed: the index of the first point with the new ones; name, old and new version of each."""
        fingerprints = [point.measured.fingerprint for point in self.points]
        changes = (changes_between(before, after, VERSIONS) for before, after in pairwise(fingerprints))
        return [(index, changed) for index, changed in enumerate(changes, 1) if changed]


@dataclass(frozen=True, slots=True)
class Note:
    """A file or line that could not be read."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class History:
    """All series of a folder, by name, and notes on lines that could not be read."""

    series: tuple[SpeedSeries, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def points(self) -> int:
        """Number of points."""
        return sum(len(series.points) for series in self.series)

    @classmethod
    def of(cls, points: Iterable[Point], notes: Iterable[Note] = ()) -> History:
        """The points in series."""
        series: dict[SeriesKey, list[Point]] = {}
        # Files are merged in any order: points of one moment need one as well.
        for point in sorted(points, key=lambda point: (point.time, point.commit, repr(point))):
            series.setdefault(point.key, []).append(point)
        return cls(tuple(SpeedSeries(key, tuple(series[key])) for key in sorted(series)), tuple(notes))


@dataclass(frozen=True, slots=True)
class Change:
    """A step in a series of n points.

    index: of the most likely first point after the step. earliest, latest: the first changed point is between them,
    both included, at 95 per cent. detected: the index of the point at which it was detected. factor: level after /
    level before; low, high: its interval at 95 per cent. before, after: levels on both sides.
    """

    index: int
    earliest: int
    latest: int
    detected: int
    factor: float
    low: float
    high: float
    before: float
    after: float

    @property
    def slower(self) -> bool:
        """True if the ratio fell."""
        return self.factor < 1


@dataclass(frozen=True, slots=True)
class Trend:
    """A series and its steps, none of absolute times. effect: the smallest step that is reported, as a share. verdict:
    of a step down. least: points from which on a step is detected; newest: how many show whether one was reversed."""

    series: SpeedSeries
    changes: tuple[Change, ...]
    effect: float
    verdict: Verdict
    least: int
    newest: int

    @property
    def name(self) -> str:
        """The subject as findings name it."""
        return str(self.series.key)

    def reversed_later(self, change: Change) -> bool:
        """Return whether the newest points are where they were before: a step up soon after one down may be
        undetected."""
        return median(self.series.values[-self.newest :]) >= change.before / (1 + self.effect)

    def bounds(self, change: Change) -> tuple[Point, Point]:
        """The last point that is surely before a step and the first that is surely after it."""
        return self.series.points[change.earliest - 1], self.series.points[change.latest]

    def versions(self, change: Change) -> str:
        """The versions that changed there."""
        good, changed = (point.measured.fingerprint for point in self.bounds(change))
        return ", ".join(f"{name} {old} to {new}" for name, old, new in changes_between(good, changed, VERSIONS))
