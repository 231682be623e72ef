"""What a history holds: points, in series that were measured on one kind of hardware. No torch, no files here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any, TypeAlias

from ampcheck.core.errors import UsageError, require_schema
from ampcheck.core.run import Scalar
from ampcheck.speed.fingerprint import VERSIONS, key_of
from ampcheck.speed.stats import SpeedRecord

SCHEMA = 1
"""Version of a line of the history. 1: the first."""

HARDWARE = ("device", "system", "threads")
"""What keeps series apart. The kernel's release is none of it: runners change it every week; it is a version."""


@dataclass(frozen=True, slots=True)
class Times:
    """A benchmark of which there is nothing but a time, as pytest-benchmark keeps it. seconds: the median."""

    name: str
    seconds: float
    precision: str = ""
    fingerprint: Mapping[str, Scalar] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """This as data for `json.dumps`."""
        plain = {known.name: getattr(self, known.name) for known in fields(self)}
        return {**plain, "fingerprint": dict(self.fingerprint)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Times:
        """What `to_dict` made. Raises `UsageError` for damaged data."""
        try:
            times = cls(str(data["name"]), float(data["seconds"]), str(data["precision"]), dict(data["fingerprint"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"these times are damaged ({error!r:.300}): import them anew") from error
        if wrong := _no_scalar(times.fingerprint):
            raise UsageError(f"these times are damaged: {wrong}: import them anew")
        if not (math.isfinite(times.seconds) and times.seconds > 0):
            raise UsageError(f"these times are damaged: a median cannot be {times.seconds!r} s")
        return times


Measured: TypeAlias = SpeedRecord | Times


@dataclass(frozen=True, slots=True)
class SeriesKey:
    """What the points of a series share. absolute: they are seconds, of which nothing is judged."""

    name: str
    arm: str
    reference: str
    precision: str
    hardware: str
    device: str = field(default="", compare=False)
    absolute: bool = False

    def __str__(self) -> str:
        what = "seconds" if self.absolute else f"{self.arm} against {self.reference}, {self.precision}"
        return f"{self.name} [{what}, {self.device}]"

    def order(self) -> tuple[Any, ...]:
        """Where a series stands among others: ratios before seconds, then by name."""
        return self.absolute, self.name, self.arm, self.reference, self.precision, self.hardware


@dataclass(frozen=True, slots=True)
class Point:
    """One line of the history. time: aware, in UTC. dirty: whether the working tree had changes; None: unknown."""

    time: datetime
    measured: Measured
    commit: str = ""
    dirty: bool | None = None

    @property
    def absolute(self) -> bool:
        """Whether there is a time and no ratio."""
        return isinstance(self.measured, Times)

    @property
    def value(self) -> float:
        """The ratio; of absolute times, seconds."""
        return self.measured.seconds if isinstance(self.measured, Times) else self.measured.ratio

    @property
    def interval(self) -> tuple[float, float]:
        """The ratio's interval; of absolute times, the value twice."""
        held = self.measured
        return (held.seconds, held.seconds) if isinstance(held, Times) else (held.low, held.high)

    @property
    def key(self) -> SeriesKey:
        """The series that this belongs to."""
        held, known = self.measured, self.measured.fingerprint
        hardware = key_of(hardware_of(known), held.precision, only=HARDWARE)
        parts = (known.get("device", "unknown device"), known.get("threads"), _system(known))
        threads = "thread" if parts[1] == 1 else "threads"
        device = ", ".join(f"{part} {threads}" if part is parts[1] else str(part) for part in parts if part)
        if isinstance(held, Times):
            return SeriesKey(held.name, "", "", held.precision, hardware, device, absolute=True)
        return SeriesKey(held.name, held.arm, held.reference, held.precision, hardware, device)

    @property
    def commit_text(self) -> str:
        """The commit as people write it, with a + where the working tree had changes."""
        return (self.commit[:10] or "unknown commit") + "+" * bool(self.dirty)

    @property
    def identity(self) -> tuple[str, ...]:
        """What no other measurement shares: all that was measured, and the commit; not when it was written down.

        Times alone may well be equal, so that those of no known commit need their time as well.
        """
        time = self.time.isoformat() if self.absolute and not self.commit else ""
        return json.dumps(self.measured.to_dict(), sort_keys=True), self.commit, time

    def to_dict(self) -> dict[str, Any]:
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
    def from_dict(cls, data: Any) -> Point:
        """The point that `to_dict` made. Raises `UsageError` for a newer schema or damaged data."""
        require_schema(data, "this line", "point of ampcheck's history", SCHEMA)
        try:
            time, commit, dirty = datetime.fromisoformat(data["time"]), data["commit"], data["dirty"]
            if time.tzinfo is None or not isinstance(commit, str) or not isinstance(dirty, bool | None):
                raise ValueError("time, commit or dirty is none")
            inside = data["record"] if "record" in data else data["times"]
            measured = record_from_dict(inside) if "record" in data else Times.from_dict(inside)
            time = time.astimezone(timezone.utc)  # the first and the last day of the calendar have no other zone
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"this line is damaged: {error!r:.300}") from error
        if not (math.isfinite(measured_value(measured)) and measured_value(measured) > 0):
            raise UsageError(f"this line is damaged: a ratio or a time cannot be {measured_value(measured)!r}")
        return cls(time, measured, commit, dirty)


def record_from_dict(data: Any) -> SpeedRecord:
    """The record that `to_dict` made. Raises `UsageError` for a newer schema, damaged data, or what is no float64."""
    record = SpeedRecord.from_dict(data)
    for known in fields(record):
        if known.type == "float":
            try:
                float(getattr(record, known.name))  # JSON has integers without end
            except OverflowError as error:
                raise UsageError(f"this speed record of ampcheck is damaged: {known.name}: {error}") from error
    if wrong := _no_scalar(record.fingerprint):
        raise UsageError(f"this speed record of ampcheck is damaged: {wrong}")
    return record


def _no_scalar(known: Mapping[Any, Any]) -> str:
    """What of a fingerprint is no name with a plain value, so that no line could be made of it again; "" if all is."""
    for name, value in known.items():
        if not isinstance(name, str) or not isinstance(value, str | int | float | None):
            return f"fingerprint cannot hold {name!r:.40}: {value!r:.40}"
    return ""


def measured_value(measured: Measured) -> float:
    """The ratio of a record; the seconds of times."""
    return measured.seconds if isinstance(measured, Times) else measured.ratio


def hardware_of(known: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The part of a fingerprint that never changes within a series."""
    return {"device": known.get("device"), "system": _system(known), "threads": known.get("threads")}


def _system(known: Mapping[str, Scalar]) -> str:
    return str(known.get("platform") or "").partition("-")[0]


VersionChange: TypeAlias = tuple[str, Scalar, Scalar]
"""What changed, its value before and after."""


def changed_versions(before: Mapping[str, Scalar], after: Mapping[str, Scalar]) -> list[VersionChange]:
    """What of the software differs between two fingerprints; empty where nothing does."""
    return [
        (name, before.get(name, "unknown"), after.get(name, "unknown"))
        for name in VERSIONS
        if before.get(name) != after.get(name)
    ]


@dataclass(frozen=True, slots=True)
class SpeedSeries:
    """The points of one key, in the order in which they were measured; never of two kinds of hardware."""

    key: SeriesKey
    points: tuple[Point, ...]

    @property
    def values(self) -> list[float]:
        """Ratios, or seconds."""
        return [point.value for point in self.points]

    def releases(self) -> list[tuple[int, list[VersionChange]]]:
        """Where versions changed: the index of the first point with the new ones, and what changed."""
        known = [point.measured.fingerprint for point in self.points]
        pairs = enumerate(pairwise(known), 1)
        return [(index, changed) for index, (one, other) in pairs if (changed := changed_versions(one, other))]


@dataclass(frozen=True, slots=True)
class Note:
    """What could not be read, and where it still is."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass(frozen=True, slots=True)
class History:
    """All series of a folder, by name, and what could not be read."""

    series: tuple[SpeedSeries, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def points(self) -> int:
        """How many points there are."""
        return sum(len(series.points) for series in self.series)

    @classmethod
    def of(cls, points: Iterable[Point], notes: Iterable[Note] = ()) -> History:
        """Points in series; two that say the same in every part are one."""
        found: dict[SeriesKey, list[Point]] = {}
        for point in points:
            found.setdefault(point.key, []).append(point)
        ordered = sorted(found, key=SeriesKey.order)
        # Files are merged in any order: points of one moment need one as well.
        series = [
            SpeedSeries(key, tuple(sorted(found[key], key=lambda p: (p.time, p.commit, repr(p))))) for key in ordered
        ]
        return cls(tuple(series), tuple(notes))
