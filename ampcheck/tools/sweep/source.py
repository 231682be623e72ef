"""Digests of the code of targets: a result is of the code that was audited, and of no other."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ampcheck.core.errors import UsageError
from ampcheck.core.git import Repository
from ampcheck.core.subject import package_root, split_member

_FILES = 1_000
"""Python files, and folders, beside a target outside any repository that are read at most."""


class CodeDigests:
    """Digests of the code of targets, each taken once: of what is there when the first target of a folder needs it.

    start: the folder that relative paths start from.
    """

    def __init__(self, start: str = "") -> None:
        self._start = Path(start).absolute()
        self._around: dict[Path, str] = {}

    def of(self, target: str) -> str:
        """The digest of a target's file and of the code around it.

        That is the state of the repository (see `Repository.state`); without one that of the Python files beside the
        target, or beside the package that it is part of, and in the folders below, of which the first 1,000 count.
        """
        file = _file_of(split_member(target)[0].rpartition(":")[0], self._start)
        folder = file.parent if file is not None else self._start
        if folder not in self._around:
            self._around[folder] = _around(folder)
        return _digest(self._around[folder].encode(), _content(file) if file is not None else b"")


def _file_of(source: str, start: Path) -> Path | None:
    """The file of `path/to/file.py` or `package.module`, which is not imported; None where there is none."""
    if source.endswith(".py"):
        path = (start / source).resolve()
        return path if path.is_file() else None
    parts = source.split(".")
    for entry in ("", *sys.path):  # the audit imports from its folder, too
        module = start.joinpath(entry, *parts)
        for path in (module / "__init__.py", module.with_name(f"{module.name}.py")):
            if path.is_file():
                return path.resolve()
    return None


def _around(folder: Path) -> str:
    try:
        return Repository.around(folder).state()
    except (UsageError, OSError):  # no repository, no commit, no git, or a file that cannot be read
        root = package_root(folder / "__init__.py")
        parts = (
            part
            for path in _python_files(root)
            for part in (path.relative_to(root).as_posix().encode(), _content(path))
        )
        return _digest(*parts)


def _python_files(folder: Path) -> Iterator[Path]:
    count = 0
    for number, (parent, folders, names) in enumerate(os.walk(folder)):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and not _is_environment(parent, name))
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(parent, name)
                count += 1
                if count == _FILES:
                    return
        if number == _FILES:
            return


def _is_environment(parent: str, name: str) -> bool:
    return name == "site-packages" or os.path.isfile(os.path.join(parent, name, "pyvenv.cfg"))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the audit reports it
        return b""


def _digest(*parts: bytes) -> str:
    hashes = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(hashes).hexdigest()[:16]
