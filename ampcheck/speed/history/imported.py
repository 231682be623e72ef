"""Points from the JSON of pytest-benchmark: its storage, and what `--benchmark-json` writes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ampcheck.core.errors import UsageError
from ampcheck.core.json_files import read_json
from ampcheck.core.run import Scalar
from ampcheck.speed.history.lines import append_points, load
from ampcheck.speed.history.points import Note, Point, Times, record_from_dict
from ampcheck.speed.stats import SpeedRecord

EXTRA = "ampcheck"
"""The key of `extra_info` with a record, or a list of records."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did. added: new points. known: points that the history had. notes: what could not be read."""

    added: int
    known: int
    notes: tuple[Note, ...] = ()


def import_benchmarks(folder: str | os.PathLike[str], files: Sequence[str | os.PathLike[str]]) -> Imported:
    """Add the benchmarks of pytest-benchmark's JSON files to the history in `folder`; a folder stands for all in it.

    A benchmark with our records in its `extra_info` gives ratios, any other a time of which nothing is judged. What the
    history has already is not added again: pytest-benchmark notes another moment than the session that kept the same
    measurement, so a point is known by what was measured and the commit. Nor are times of a benchmark of which the
    history has ratios at that commit. Raises `UsageError` for a file that is none of pytest-benchmark's, before
    anything is added.
    """
    notes: list[Note] = []
    points = [point for file in _files(files) for point in _points(file, notes)]
    place = Path(folder)
    held = [point for series in load(place).series for point in series.points] if place.is_dir() else []
    known = {point.identity for point in held}
    judged = _judged([*held, *points])
    new: dict[tuple[str, ...], Point] = {}
    for point in points:
        if point.identity not in known and not (point.absolute and (point.commit, point.measured.name) in judged):
            new.setdefault(point.identity, point)
    added = append_points(place, list(new.values()))
    return Imported(added, len(points) - added, tuple(notes))


def _judged(points: Iterable[Point]) -> set[tuple[str, str]]:
    """Known commits and benchmarks of which there is a ratio."""
    return {(point.commit, point.measured.name) for point in points if point.commit and not point.absolute}


def _files(given: Sequence[str | os.PathLike[str]]) -> Iterator[Path]:
    for path in map(Path, given):
        if not path.is_dir():
            yield path
            continue
        inside = sorted(path.rglob("*.json"))
        if not inside:
            raise UsageError(f"cannot import {path}: it holds no JSON of pytest-benchmark")
        yield from inside


def _points(path: Path, notes: list[Note]) -> Iterator[Point]:
    try:
        data = read_json(path)
    except OSError as error:
        raise UsageError(f"cannot import {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"cannot import {path}: it is no JSON of pytest-benchmark ({error})") from error
    try:
        benchmarks, machine = list(data["benchmarks"]), dict(data["machine_info"])
        commit = data.get("commit_info") or {}
        time = datetime.fromisoformat(str(data["datetime"]))
        name, dirty = str(commit.get("id") or ""), commit.get("dirty")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"cannot import {path}: it is no JSON of pytest-benchmark ({error!r:.300})") from error
    if time.tzinfo is None:
        time = time.replace(tzinfo=timezone.utc)
    name = "" if name == "unversioned" else name
    for number, benchmark in enumerate(benchmarks, 1):
        try:
            for measured in _measured(benchmark, machine):
                point = Point(time, measured, name, dirty if name and isinstance(dirty, bool) else None)
                yield Point.from_dict(point.to_dict())  # says now what would not be read back later
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:  # noqa: PERF203  # each alone
            reason = str(error) if isinstance(error, UsageError) else repr(error)
            notes.append(Note(f"{path.name}, benchmark {number}", f"was not imported: {reason}"))


def _measured(benchmark: Mapping[str, Any], machine: Mapping[str, Any]) -> list[SpeedRecord | Times]:
    kept = (benchmark.get("extra_info") or {}).get(EXTRA)
    if kept:
        return [record_from_dict(item) for item in (kept if isinstance(kept, list) else [kept])]
    seconds = float(benchmark["stats"]["median"])
    return [Times(str(benchmark.get("fullname") or benchmark["name"]), seconds, fingerprint=_fingerprint(machine))]


def _fingerprint(machine: Mapping[str, Any]) -> dict[str, Scalar]:
    """What pytest-benchmark tells of the machine, in our words; the host's name is none of it, as runners change it."""
    cpu = machine.get("cpu") or {}
    brand = str(cpu.get("brand_raw") or machine.get("processor") or machine.get("machine") or "unknown")
    known: dict[str, Scalar] = {"device": f"cpu ({brand}, {cpu.get('count', 'unknown')} logical cores)"}
    known["platform"] = "-".join(str(machine[part]) for part in ("system", "release") if machine.get(part))
    known["python"] = str(machine.get("python_version", ""))
    return known
