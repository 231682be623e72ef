"""The folder of a history: JSON lines that are only ever added, by any number of processes, machines and branches.

There is one file for each kind of hardware, versions and precision, so that runners that differ hardly ever write into
the same file; but each line tells all about itself, and the reader asks neither the file's name nor the order of lines.
So files may be merged line by line (`.gitattributes` tells git to keep the lines of both sides), joined, split and
renamed; a line that came in twice counts once.

A line is written by a single `write` to a file opened for appending, under a lock where the system has one. What a
process that died left of a line stays where it is: the next line begins on its own, and the reader tells of the rest.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from ampcheck.core.errors import UsageError
from ampcheck.core.file_lock import locked
from ampcheck.core.json_files import conflict_in, parse_json, tag_nonfinite, untag_nonfinite
from ampcheck.speed.fingerprint import key_of
from ampcheck.speed.history.points import SCHEMA, History, Note, Point
from ampcheck.speed.history.working_tree import commit_of
from ampcheck.speed.stats import SpeedRecord

ENDING = ".jsonl"
ATTRIBUTES = ".gitattributes"
MERGE = f"*{ENDING} merge=union text eol=lf\n"
PATIENCE = 30.0
"""Seconds that a writer waits for the lock. A single write needs none to stay whole; the lock keeps torn ends apart."""

_ANY_SCHEMA = 10**30  # what is larger was written by nobody, and may have hundreds of digits


def append(
    folder: str | os.PathLike[str],
    records: Sequence[SpeedRecord],
    *,
    commit: str | None = None,
    dirty: bool | None = None,
    time: datetime | None = None,
) -> int:
    """Add a line for each record to the history in `folder`, which is made where there is none.

    commit: its name, "" for unknown; without it, and without `dirty`, git is asked about the working directory. time:
    of the measurement, with a time zone; now without it. Returns how many lines were added.

    Raises `UsageError` where the folder cannot be written or the disk is full: what was there is as it was, and the
    message says how many records were kept.
    """
    if time is not None and time.tzinfo is None:
        raise UsageError("the time of a measurement needs a time zone, such as datetime.now(timezone.utc)")
    if commit is None:
        known = commit_of(besides=Path(folder))
        commit, dirty = known.name, known.dirty if dirty is None else dirty
    when = time or datetime.now(timezone.utc)
    return append_points(folder, [Point(when, record, commit, dirty) for record in records])


def append_points(folder: str | os.PathLike[str], points: Sequence[Point]) -> int:
    """The same for whole points. Those that the history would not read back are refused before anything is written."""
    texts: dict[str, list[str]] = {}
    for point in points:
        Point.from_dict(untag_nonfinite(json.loads(_line(point))))  # as `load` will
        texts.setdefault(_file_of(point), []).append(_line(point))
    if not texts:
        return 0
    place, kept = Path(folder), 0
    _prepare(place)
    for name, lines in texts.items():
        try:
            _write(place / name, "".join(lines).encode("ascii"))
        except OSError as error:
            raise UsageError(
                f"cannot add to the history {place}: {error.strerror or error}; of {len(points)} records {kept} were "
                "kept, and all that was there before; mend it and add them again: what is there twice counts once"
            ) from error
        kept += len(lines)
    return kept


def load(folder: str | os.PathLike[str]) -> History:
    """The history in `folder`. What cannot be read is told in its notes and stays where it is.

    Raises `UsageError` where the folder cannot be read.
    """
    place = Path(folder)
    try:
        files = sorted(file for file in place.iterdir() if file.suffix == ENDING)
    except OSError as error:
        raise UsageError(f"no history can be read from {place}: {error.strerror or error}") from error
    notes: list[Note] = []
    points: dict[str, Point] = {}
    for file in files:
        try:
            data = file.read_bytes()
        except OSError as error:
            notes.append(Note(file.name, f"cannot be read: {error.strerror or error}"))
            continue
        points |= _read(file.name, data, notes)
    return History.of(points.values(), notes)


def _read(name: str, data: bytes, notes: list[Note]) -> Iterator[tuple[str, Point]]:
    """Points by what they say, so that the same line counts once."""
    newer: dict[int, int] = {}
    *whole, last = data.split(b"\n")
    for number, line in enumerate([*whole, last], 1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            plain = untag_nonfinite(parse_json(line))
        except ValueError as error:
            what = _damage(line, error, torn=number == len(whole) + 1)
            notes.append(Note(place, f"{what}; it was left as it is"))
            continue
        schema = plain.get("schema") if isinstance(plain, dict) else None
        if type(schema) is int and schema > SCHEMA:
            newer[schema] = newer.get(schema, 0) + 1
            continue
        try:
            point = Point.from_dict(plain)
        except UsageError as error:
            notes.append(Note(place, f"{error}; it was left as it is"))
            continue
        yield _line(point), point
    for number, count in newer.items():
        schema = str(number) if number <= _ANY_SCHEMA else "far beyond this one"
        lines = "1 line" if count == 1 else f"{count:,} lines"
        newest = f"newer than this ampcheck reads ({SCHEMA})"
        notes.append(Note(name, f"{lines} of schema {schema}, {newest}: kept, not judged; update ampcheck"))


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


def _prepare(place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), open(place / ATTRIBUTES, "x", encoding="utf-8") as stream:
            stream.write(MERGE)
    except OSError as error:
        raise UsageError(f"cannot add to the history {place}: {error.strerror or error}; nothing was kept") from error


def _write(path: Path, data: bytes) -> None:
    """Add `data`, which ends with a newline, whole or not at all, whatever the file ended with."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with locked(handle, PATIENCE) as alone:
            size = os.fstat(handle).st_size
            if size:
                os.lseek(handle, size - 1, os.SEEK_SET)
                if os.read(handle, 1) != b"\n":
                    data = b"\n" + data  # what a dead process left of its line stays a line of its own
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
