"""Points from the JSON of pytest-benchmark: its storage, and the output of `--benchmark-json`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from ampcheck.core.errors import UsageError
from ampcheck.core.json_files import read_json
from ampcheck.core.run import Scalar
from ampcheck.speed.history.records import Note, Point, Times
from ampcheck.speed.history.storage import append_points, load
from ampcheck.speed.stats import SpeedRecord


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import. added: new points. known: points that the history had. notes: unreadable benchmarks."""

    added: int
    known: int
    notes: tuple[Note, ...] = ()


def import_benchmarks(folder: str | os.PathLike[str], files: Sequence[str | os.PathLike[str]]) -> Imported:
    """Add the benchmarks of pytest-benchmark's JSON files to the history in `folder`; a folder stands for all in it.

    A benchmark with records of ampcheck in its `extra_info` gives ratios, any other a time, which is not judged. A
    point that the history has is not added again: pytest-benchmark stores another moment than the session that recorded
    the same measurement, so a point is identified by its values and the commit. Nor are times of a benchmark of which
    the history has ratios at that commit. Raises `UsageError` for a file that is none of pytest-benchmark's, before
    anything is added.
    """
    notes: list[Note] = []
    points = [point for file in _files(files) for point in _points(file, notes)]
    stored = [point for series in load(folder).series for point in series.points] if Path(folder).is_dir() else []
    known = {point.identity for point in stored}
    ratios = {(p.commit, p.measured.name) for p in (*stored, *points) if p.commit and not p.absolute}
    new: dict[tuple[str, ...], Point] = {}
    for point in points:
        if point.identity not in known and not (point.absolute and (point.commit, point.measured.name) in ratios):
            new.setdefault(point.identity, point)
    added = append_points(folder, list(new.values()))
    return Imported(added, len(points) - added, tuple(notes))


def _files(paths: Sequence[str | os.PathLike[str]]) -> Iterator[Path]:
    for path in map(Path, paths):
        inside = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        if not inside:
            raise UsageError(f"cannot import {path}: it contains no JSON of pytest-benchmark")
        yield from inside


def _points(path: Path, notes: list[Note]) -> Iterator[Point]:
    try:
        data = read_json(path)
        benchmarks, machine = list(data["benchmarks"]), dict(data["machine_info"])
        commit = data.get("commit_info") or {}
        time = datetime.fromisoformat(str(data["datetime"]))
        name, dirty = str(commit.get("id") or ""), commit.get("dirty")
    except OSError as error:
        raise UsageError(f"cannot import {path}: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"{error!r:.300}"
        raise UsageError(f"cannot import {path}: it is no JSON of pytest-benchmark ({reason})") from error
    if time.tzinfo is None:
        time = time.replace(tzinfo=timezone.utc)
    name = "" if name == "unversioned" else name
    for number, benchmark in enumerate(benchmarks, 1):
        try:
            for measured in _measured(benchmark, machine):
                point = Point(time, measured, name, dirty if name and isinstance(dirty, bool) else None)
                yield Point.from_dict(point.to_dict())  # raises now for what could not be read back later
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:  # noqa: PERF203  # each alone
            reason = str(error) if isinstance(error, UsageError) else repr(error)
            notes.append(Note(f"{path.name}, benchmark {number}", f"was not imported: {reason}"))


def records_in(benchmark: Mapping[str, object]) -> list[SpeedRecord]:
    """The records of ampcheck in a benchmark. Raises `UsageError` for one that is damaged or newer."""
    extra = benchmark.get("extra_info")
    stored = extra.get("ampcheck") if isinstance(extra, Mapping) else None
    items = stored if isinstance(stored, list) else [stored] if stored else []
    return [SpeedRecord.from_dict(item) for item in items]


def _measured(benchmark: Mapping[str, object], machine: Mapping[str, object]) -> Sequence[SpeedRecord | Times]:
    if records := records_in(benchmark):
        return records
    seconds = float(benchmark["stats"]["median"])  # type: ignore[index]
    name = str(benchmark.get("fullname") or benchmark["name"])
    return [Times(name, seconds, fingerprint=_fingerprint(machine))]


def _fingerprint(machine: Mapping[str, object]) -> dict[str, Scalar]:
    """The machine in the words of `speed.fingerprint`; without the host's name, as runners change it."""
    stored = machine.get("cpu")
    cpu: Mapping[str, object] = stored if isinstance(stored, Mapping) else {}
    brand = str(cpu.get("brand_raw") or machine.get("processor") or machine.get("machine") or "unknown")
    return {
        "device": f"cpu ({brand}, {cpu.get('count', 'unknown')} logical cores)",
        "platform": "-".join(str(machine[part]) for part in ("system", "release") if machine.get(part)),
        "python": str(machine.get("python_version", "")),
    }
