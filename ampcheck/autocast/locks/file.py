"""The lock file: which ops each model sends through autocast, as data in a file next to its code. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampcheck.autocast.policy import one_op_a_line
from ampcheck.core.errors import UsageError, require_schema
from ampcheck.core.files import only_writer, write_atomically
from ampcheck.core.json_files import from_plain, parse_json, untag_nonfinite
from ampcheck.core.updating import note_written
from ampcheck.records.policy import Locked

SCHEMA = 1
"""Version of the JSON form. 1: the first."""

NAME = "ampcheck.lock.json"
BY_PYTEST = "pytest --ampcheck-update"
ANY_COMMAND = f"{BY_PYTEST}, or ampcheck policy lock TARGET"
"""The commands that write or refresh an entry; that of a marked test by pytest alone."""

PATIENCE = 60.0
"""Seconds for which a writer waits for another to finish."""

Entries = Mapping[str, Locked]
"""By `device/dtype`, such as `cuda/float16`."""


@dataclass(frozen=True, slots=True)
class LockFile:
    """All locked models of a folder, by name."""

    targets: Mapping[str, Entries]

    def entries(self, name: str, file: str = NAME, command: str = ANY_COMMAND) -> Entries:
        """The entries of a model. Raises `UsageError` naming those that there are and the command to add this one."""
        if name not in self.targets:
            there = ", ".join(self.targets) or "none"
            raise UsageError(f"{file} has no entry for {name}; it has {there}; add it with {command}")
        return self.targets[name]

    def to_text(self) -> str:
        """JSON in a fixed order, one op a line, so that two runs give the same bytes and a diff can be read."""
        targets = {
            name: {key: entry.to_json() for key, entry in sorted(entries.items())}
            for name, entries in sorted(self.targets.items())
        }
        return one_op_a_line({"schema": SCHEMA, "targets": targets})

    @classmethod
    def from_text(cls, text: str, file: str = NAME) -> LockFile:
        """The file that `to_text` wrote. Raises `UsageError` for what is damaged or of a newer schema."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise UsageError(f"{file} is damaged ({error}): restore it, or delete it and lock again") from error
        require_schema(data, file, "lock of ampcheck", SCHEMA)
        try:
            return cls({name: _entries_from(entries) for name, entries in data["targets"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{file} is damaged ({error!r:.300}): restore it, or delete it and lock again") from error

    @classmethod
    def load(cls, path: Path) -> LockFile:
        """The file at `path`. Raises `UsageError` where it cannot be read."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"no lock could be read from {path.name}: {error}") from error
        return cls.from_text(text, path.name)


def update(path: Path, name: str, entries: Entries, *, whole: bool = False) -> None:
    """Write the entries of one model into the file at `path`; those of other models stay.

    whole: entries of this model for other devices and dtypes are dropped.

    Several processes may do so at once: none loses what another wrote, where the system can lock files. Raises
    `UsageError` where it cannot be written, or is damaged: then it stays unchanged.
    """
    with only_writer(path, PATIENCE):
        targets = LockFile.load(path).targets if path.exists() else {}
        others = {} if whole else targets.get(name, {})
        text = LockFile({**targets, name: {**others, **entries}}).to_text()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text)
    note_written(path, name)


def _entries_from(data: Mapping[str, Any]) -> Entries:
    entries = {key: from_plain(Locked, untag_nonfinite(entry)) for key, entry in data.items()}
    if any(len(key.split("/")) != 2 for key in entries):
        raise ValueError("an entry is of no device/dtype")
    ops = [op for entry in entries.values() for op in entry.ops.values()]
    if any(len(site) != 2 for op in ops for sites in op.calls.values() for site in sites):
        raise ValueError("a call has no module and line")
    return entries
