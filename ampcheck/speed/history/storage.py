"""The folder of a history: JSON lines that are only ever appended, by any number of processes, machines and branches.

There is one file for each kind of hardware, versions and precision, so that different runners rarely write into the
same file; but each line is complete, and the reader ignores the file's name and the order of lines. So files may be
merged line by line (`.gitattributes` makes git keep the lines of both sides), joined, split and renamed; a line that
occurs twice counts once.

A line is written by a single `write` to a file opened for appending, under a lock where the system has one. The rest of
a line whose writer died stays where it is: the next line begins on its own, and the reader reports the rest.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from ampcheck.core.errors import UsageError
from ampcheck.core.files import locked
from ampcheck.core.git import Repository
from ampcheck.core.json_files import conflict_in, parse_json, read_json, tag_nonfinite, untag_nonfinite
from ampcheck.core.run import Scalar
from ampcheck.records.history import SCHEMA, History, Note, Point, Times
from ampcheck.records.speed import SpeedRecord, key_of

ENDING = ".jsonl"
PATIENCE = 30.0
"""Seconds that a writer waits for the lock. A single write needs none to stay whole; the lock keeps torn ends apart."""

_ANY_SCHEMA = 10**30  # a larger one is damage, and may have hundreds of digits


class Commit(NamedTuple):
    """A commit's full name and whether the working tree differed from it; "" and None without git."""

    name: str = ""
    dirty: bool | None = None


def commit_of(folder: Path | None = None, *, besides: Path | None = None) -> Commit:
    """The commit that is checked out at `folder` (the working directory).

    besides: a folder whose changes do not count, such as the history itself. Files that git does not track do not
    count either.
    """
    try:
        repository = Repository.around(folder or Path.cwd())
        name = repository.commit("HEAD")
    except UsageError:
        return Commit()
    return Commit(name, repository.dirty(besides))


def append(
    folder: str | os.PathLike[str],
    records: Sequence[SpeedRecord],
    *,
    commit: str | None = None,
    dirty: bool | None = None,
    time: datetime | None = None,
) -> int:
    """Append a line for each record to the history in `folder`, which is created if needed.

    commit: its name, "" for unknown; by default that of the working directory, as is `dirty`. time: of the
    measurement, with a time zone; by default now. Returns how many lines were added.

    Raises `UsageError` where the folder cannot be written or the disk is full: the files are then unchanged, and the
    message says how many records were added.
    """
    if time is not None and time.tzinfo is None:
        raise UsageError("the time of a measurement needs a time zone, such as datetime.now(timezone.utc)")
    if commit is None:
        known = commit_of(besides=Path(folder))
        commit, dirty = known.name, known.dirty if dirty is None else dirty
    when = time or datetime.now(timezone.utc)
    return append_points(folder, [Point(when, record, commit, dirty) for record in records])


def append_points(folder: str | os.PathLike[str], points: Sequence[Point]) -> int:
    """The same for whole points. Raises before anything is written for a point that could not be read back."""
    texts: dict[str, list[str]] = {}
    for point in points:
        Point.from_dict(untag_nonfinite(json.loads(_line(point))))  # as `load` will
        texts.setdefault(_file_of(point), []).append(_line(point))
    if not texts:
        return 0
    path, added = Path(folder), 0
    try:
        path.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), open(path / ".gitattributes", "x", encoding="utf-8") as stream:
            stream.write(f"*{ENDING} merge=union text eol=lf\n")
    except OSError as error:
        raise UsageError(f"cannot add to the history {path}: {error.strerror or error}; nothing was added") from error
    for name, lines in texts.items():
        try:
            _write(path / name, "".join(lines).encode("ascii"))
        except OSError as error:
            raise UsageError(
                f"cannot add to the history {path}: {error.strerror or error}; of {len(points)} records {added} were "
                "added, and earlier ones are unchanged; free the disk and add them again: a line counts once"
            ) from error
        added += len(lines)
    return added


def load(folder: str | os.PathLike[str]) -> History:
    """The history in `folder`. Its notes report lines and files that cannot be read, which stay where they are.

    Raises `UsageError` where the folder cannot be read.
    """
    try:
        files = sorted(file for file in Path(folder).iterdir() if file.suffix == ENDING)
    except OSError as error:
        raise UsageError(f"no history can be read from {folder}: {error.strerror or error}") from error
    notes: list[Note] = []
    points: dict[str, Point] = {}
    for file in files:
        try:
            points |= _read(file.name, file.read_bytes(), notes)
        except OSError as error:  # noqa: PERF203  # each alone
            notes.append(Note(file.name, f"cannot be read: {error.strerror or error}"))
    return History.of(points.values(), notes)


def _read(name: str, data: bytes, notes: list[Note]) -> Iterator[tuple[str, Point]]:
    """Points by their line, so that the same line counts once."""
    newer: dict[int, int] = {}
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            plain = untag_nonfinite(parse_json(line))
            schema = plain.get("schema") if isinstance(plain, Mapping) else None
            if type(schema) is int and schema > SCHEMA:
                newer[schema] = newer.get(schema, 0) + 1
                continue
            point = Point.from_dict(plain)
        except ValueError as error:
            what = str(error) if isinstance(error, UsageError) else _damage(line, error, torn=number == len(lines))
            notes.append(Note(f"{name}, line {number}", f"{what}; it was left unchanged"))
            continue
        yield _line(point), point
    for number, count in newer.items():
        schema = str(number) if number <= _ANY_SCHEMA else "far beyond this one"
        counted = "1 line" if count == 1 else f"{count:,} lines"
        newest = f"newer than this ampcheck reads ({SCHEMA})"
        notes.append(Note(name, f"{counted} of schema {schema}, {newest}: not judged; update ampcheck"))


def _damage(line: bytes, error: ValueError, *, torn: bool) -> str:
    if conflict_in(line.decode("utf-8", "replace")):
        return "is a conflict marker of git: the lines of both sides are read"
    if torn:
        return "is torn: the process that wrote it did not end it"
    return f"is damaged: {error}" if type(error) is ValueError else "is damaged"  # JSON's own errors say where, not why


def _file_of(point: Point) -> str:
    known = point.measured.fingerprint
    device = re.sub(r"[^a-z0-9]+", "-", str(known.get("device", "times")).lower()).strip("-")[:40] or "times"
    return f"{device}-{key_of(known, point.measured.precision)}{ENDING}"


def _line(point: Point) -> str:
    return json.dumps(tag_nonfinite(point.to_dict()), allow_nan=False) + "\n"


def _write(path: Path, data: bytes) -> None:
    """Append `data`, which ends with a newline, whole or not at all, whatever the file ended with."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with locked(handle, PATIENCE) as alone:
            size = os.fstat(handle).st_size
            if size:
                os.lseek(handle, size - 1, os.SEEK_SET)
                if os.read(handle, 1) != b"\n":
                    data = b"\n" + data  # the torn line of a dead process stays a line of its own
            try:
                while data:  # one write, as a rule; the second raises what stopped the first, such as a full disk
                    data = data[os.write(handle, data) :]
                os.fsync(handle)
            except OSError:
                if alone:  # nobody else can have added anything behind `size`
                    with suppress(OSError):
                        os.ftruncate(handle, size)
                raise
    finally:
        os.close(handle)


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
    """The machine in the words of `speed.paired.fingerprint`; without the host's name, as runners change it."""
    stored = machine.get("cpu")
    cpu: Mapping[str, object] = stored if isinstance(stored, Mapping) else {}
    brand = str(cpu.get("brand_raw") or machine.get("processor") or machine.get("machine") or "unknown")
    return {
        "device": f"cpu ({brand}, {cpu.get('count', 'unknown')} logical cores)",
        "platform": "-".join(str(machine[part]) for part in ("system", "release") if machine.get(part)),
        "python": str(machine.get("python_version", "")),
    }
