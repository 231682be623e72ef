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
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from ampcheck.core.errors import UsageError
from ampcheck.core.files import locked
from ampcheck.core.json_files import conflict_in, parse_json, tag_nonfinite, untag_nonfinite
from ampcheck.speed.fingerprint import key_of
from ampcheck.speed.history.records import SCHEMA, History, Note, Point
from ampcheck.speed.stats import SpeedRecord

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
    inside = folder or Path.cwd()
    name, root = _git(inside, "rev-parse", "--verify", "HEAD"), _git(inside, "rev-parse", "--show-toplevel")
    if not name or not root:
        return Commit()
    paths = [":(top)"]
    if besides is not None and besides.resolve().is_relative_to(top := Path(root).resolve()):
        excluded = besides.resolve().relative_to(top).as_posix()
        paths += [f":(top,exclude,literal){excluded}"] if excluded != "." else []
    changes = _git(inside, "status", "--porcelain", "--untracked-files=no", "--", *paths)
    return Commit(name, None if changes is None else bool(changes))


def _git(folder: Path, *command: str) -> str | None:
    """The output of git, stripped; None where it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


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
