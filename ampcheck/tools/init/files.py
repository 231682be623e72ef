"""The files of a plan are written all or none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ampcheck.core.errors import UsageError
from ampcheck.core.files import write_atomically


@dataclass(frozen=True, slots=True)
class Planned:
    """A file to write. what: in words. before: its text if it exists, else None."""

    path: Path
    text: str
    what: str
    before: str | None = None


def require_writable(path: Path) -> None:
    """Raise `UsageError` where no file can be created at a path, whose folders need not exist, or where a device is."""
    if path.exists() and not path.is_file():
        raise UsageError(f"cannot write {path}: it is no file but {os.path.realpath(path)}; nothing was written")
    parent = next(each for each in path.parents if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {path}: no file can be created in {parent}; nothing was written")


def write(files: Sequence[Planned]) -> None:
    """Write the files, all or none. Raises `UsageError` where one cannot be written, or came up meanwhile."""
    begun: list[Planned] = []
    folders: list[Path] = []
    try:
        for planned in files:
            if planned.before is None and planned.path.exists():
                raise UsageError(f"{planned.path} came up meanwhile; run ampcheck init again")
            _make_folders(planned.path.parent, folders)
            begun.append(planned)  # first, as Ctrl-C may come before the call returns
            write_atomically(planned.path, planned.text)
    except BaseException as error:
        _restore(begun, folders)
        if isinstance(error, UsageError):
            raise UsageError(f"{error}; nothing was written") from error
        raise


def _restore(begun: Sequence[Planned], folders: Sequence[Path]) -> None:
    """Remove the new files and folders, and put back the text of those that existed."""
    for planned in begun:
        if planned.before is None:
            planned.path.unlink(missing_ok=True)
        elif planned.path.read_bytes() != planned.before.encode("utf-8"):
            write_atomically(planned.path, planned.before)
    for folder in reversed(folders):
        with suppress(OSError):
            folder.rmdir()


def _make_folders(folder: Path, made: list[Path]) -> None:
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        try:
            each.mkdir()
        except OSError as error:
            raise UsageError(f"cannot create {each}: {error.strerror}") from error
        made.append(each)
