"""The lock file: which ops each model sends through autocast, as data kept beside its code. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampcheck.core.errors import UsageError, require_schema
from ampcheck.core.file_lock import only_writer
from ampcheck.core.files import write_atomically
from ampcheck.core.json_files import parse_json

SCHEMA = 1
"""Version of the JSON form. 1: the first."""

NAME = "ampcheck.lock.json"
BY_PYTEST = "pytest --ampcheck-update"
ANY_WAY = f"{BY_PYTEST}, or ampcheck policy lock TARGET"
"""How an entry is made or refreshed; that of a marked test by pytest alone."""

PATIENCE = 60.0
"""How many seconds a writer waits for another to finish."""

Places = tuple[tuple[str, str], ...]
"""Module path and `file:line`, of each place that calls an op in the same way."""


@dataclass(frozen=True, slots=True)
class LockedOp:
    """One op of a model. rule: on the device. calls: `given -> got` dtypes to the places where they are so."""

    rule: str
    calls: Mapping[str, Places]

    @property
    def used(self) -> frozenset[tuple[str, str]]:
        """The dtypes and the module of each call; lines, which move with every edit, are left out."""
        return frozenset((dtypes, module) for dtypes, places in self.calls.items() for module, _ in places)


@dataclass(frozen=True, slots=True)
class Locked:
    """What one model sends through autocast on one device in one dtype. torch, build: of the PyTorch that it ran."""

    torch: str
    build: str
    ops: Mapping[str, LockedOp]


Entries = Mapping[str, Locked]
"""By `device/dtype`, such as `cuda/float16`."""


@dataclass(frozen=True, slots=True)
class LockFile:
    """All locked models of a folder, by name."""

    targets: Mapping[str, Entries]

    def entries(self, name: str, file: str = NAME, ways: str = ANY_WAY) -> Entries:
        """What was locked of a model. Raises `UsageError` naming those that there are and `ways` to add this one."""
        if name not in self.targets:
            there = ", ".join(self.targets) or "none"
            raise UsageError(f"{file} has no entry for {name}; it has {there}; add it with {ways}")
        return self.targets[name]

    def with_(self, name: str, entries: Entries, *, whole: bool = False) -> LockFile:
        """This file with these entries of one model; its others are kept unless these are the `whole` of it."""
        kept = {} if whole else self.targets.get(name, {})
        return LockFile({**self.targets, name: {**kept, **entries}})

    def to_text(self) -> str:
        """JSON in a fixed order, one op a line, so that two runs give the same bytes and a diff can be read."""
        lines = ["{", f' "schema": {SCHEMA},', ' "targets": {']
        lines += _block([(name, _entries_lines(held)) for name, held in sorted(self.targets.items())], "  ")
        return "\n".join([*lines, " }", "}"]) + "\n"

    @classmethod
    def from_text(cls, text: str, file: str = NAME) -> LockFile:
        """The file that `to_text` wrote. Raises `UsageError` for what is damaged or of a newer schema."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise UsageError(f"{file} is damaged ({error}): restore it, or delete it and lock again") from error
        require_schema(data, file, "lock of ampcheck", SCHEMA)
        try:
            return cls({_text(name): _entries_from(held) for name, held in data["targets"].items()})
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
    """Write the entries of one model into the file at `path`, those of other models kept.

    whole: entries of this model for other devices and dtypes are dropped.

    Several processes may do so at once: none loses what another wrote, where the system can lock files. Raises
    `UsageError` where it cannot be written, or is damaged: it stays then.
    """
    with only_writer(path, PATIENCE):
        held = LockFile.load(path) if path.exists() else LockFile({})
        text = held.with_(name, entries, whole=whole).to_text()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text)
    written = _updating.get()
    if written is not None:
        written.append((str(path), name))


@contextmanager
def updating() -> Iterator[list[tuple[str, str]]]:
    """Inside, locks are rewritten instead of compared; yields each file and entry that was written."""
    written: list[tuple[str, str]] = []
    token = _updating.set(written)
    try:
        yield written
    finally:
        _updating.reset(token)


def is_updating() -> bool:
    """Whether `pytest --ampcheck-update` runs."""
    return _updating.get() is not None


_updating: ContextVar[list[tuple[str, str]] | None] = ContextVar("ampcheck_updating", default=None)


def _block(items: list[tuple[str, list[str] | str]], indent: str) -> list[str]:
    """`"key": value` lines of a JSON object; a value of several lines is an object of its own."""
    lines: list[str] = []
    for number, (key, value) in enumerate(items):
        comma = "," if number < len(items) - 1 else ""
        if isinstance(value, str):
            lines.append(f"{indent}{json.dumps(key)}: {value}{comma}")
        else:
            lines += [f"{indent}{json.dumps(key)}: {{", *(f"{indent}{line}" for line in value), f"{indent}}}{comma}"]
    return lines


def _entries_lines(entries: Entries) -> list[str]:
    return _block([(key, _locked_lines(held)) for key, held in sorted(entries.items())], " ")


def _locked_lines(locked: Locked) -> list[str]:
    ops = [(name, json.dumps(_op_to_json(op))) for name, op in sorted(locked.ops.items())]
    head: list[tuple[str, list[str] | str]] = [("torch", json.dumps(locked.torch)), ("build", json.dumps(locked.build))]
    return _block([*head, ("ops", _block([*ops], " "))], " ")


def _op_to_json(op: LockedOp) -> dict[str, Any]:
    return {"rule": op.rule, "calls": {dtypes: sorted(map(list, at)) for dtypes, at in sorted(op.calls.items())}}


def _entries_from(data: Mapping[str, Any]) -> Entries:
    entries = {}
    for key, held in data.items():
        if len(key.split("/")) != 2:
            raise ValueError(f"{key!r:.80} is no device/dtype")
        ops = {_text(name): _op_from(op) for name, op in held["ops"].items()}
        entries[key] = Locked(_text(held["torch"]), _text(held["build"]), ops)
    return entries


def _op_from(data: Mapping[str, Any]) -> LockedOp:
    calls = {
        _text(dtypes): tuple((_text(module), _text(place)) for module, place in places)
        for dtypes, places in data["calls"].items()
    }
    return LockedOp(_text(data["rule"]), calls)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} stands where text belongs")
    return value
