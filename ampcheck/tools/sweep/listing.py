"""Targets of a sweep: a list of targets in a file, a collection, or a folder with one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from ampcheck.core.errors import UsageError
from ampcheck.core.subject import is_architecture, name_of_target, split_member
from ampcheck.core.worker import Worker

ZOO = "zoo.py:ZOO"
"""The collection of a folder."""

_GLOB = frozenset("*?")

_REQUIRED = "a sweep needs a file of targets, a folder with a zoo.py, or file.py:collection"


@dataclass(frozen=True, slots=True)
class Entry:
    """A target of a sweep. family: of models that are summed up together, empty where it is not known."""

    target: str
    family: str = ""


def read_list(source: str, only: str = "*") -> list[Entry]:
    """The targets that a list names, one of each family first, then a second of each.

    source: a file with a target a line, where `#` begins a comment; a collection (see `load_collection`), as
    `package.module:attribute` or `path/to/file.py:attribute`; the architecture of a library; or a folder with
    the collection `ZOO` in `zoo.py`. A target of a file may be `collection[pattern]`. only: a pattern of names.
    Collections are loaded in a process of their own. Raises `UsageError` for a list that cannot be read, or that names
    nothing.
    """
    families = cache(_families)
    entries = [entry for target in _targets(source) for entry in _expanded(target, families)]
    entries = [entry for entry in dict.fromkeys(entries) if fnmatchcase(name_of_target(entry.target), only)]
    if not entries:
        raise UsageError(f"{source} names no target" + (f" that matches --only {only!r}" if only != "*" else ""))
    return list(_interleaved(entries))


def _targets(source: str) -> list[str]:
    path = Path(source)
    if not source.strip():
        raise UsageError(f"{_REQUIRED}; found an empty name")
    if path.is_dir():
        if not (path / "zoo.py").is_file():
            raise UsageError(f"{path} must have a zoo.py with the mapping ZOO, of names to subjects; it has no zoo.py")
        return [f"{path / ZOO}[*]"]
    if path.suffix == ".py":
        raise UsageError(f"a sweep of a Python file needs the name of the collection in it, {source}:NAME")
    if path.exists():
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} must be a text file with a target a line: {error}") from error
        return [line for text in lines if (line := text.partition(" #")[0].strip()) and not line.startswith("#")]
    if is_architecture(source):
        return [source]
    if ":" in source:
        return [source if split_member(source)[1] else f"{source}[*]"]
    raise UsageError(f"{_REQUIRED}; found {source}")


def _expanded(target: str, families: Callable[[str], Mapping[str, str]]) -> Iterator[Entry]:
    """The entries of a line, in which `collection[pattern]` stands for all that match. families: see `_families`."""
    collection, pattern = split_member(target)
    if not pattern:
        yield Entry(target)
    elif not _GLOB.intersection(pattern):
        yield Entry(target, families(collection).get(pattern, ""))
    else:
        for name, family in _members(collection).items():
            if fnmatchcase(name, pattern):
                yield Entry(f"{collection}[{name}]", family)


def _members(collection: str) -> Mapping[str, str]:
    """The names of a collection with their families, loaded in a process of its own."""
    with Worker("ampcheck.tools.sweep.child_process", name=collection) as worker:
        try:
            return dict(worker.ask("members", collection=collection))
        except UsageError as error:  # it names the collection itself, unless the worker has ended
            raise UsageError(str(error).removeprefix(f"{collection}: ")) from error


def _families(collection: str) -> Mapping[str, str]:
    """The same; nothing of a collection that cannot be loaded, which the audit of its members reports."""
    try:
        return _members(collection)
    except UsageError:
        return {}


def _interleaved(entries: Iterable[Entry]) -> Iterator[Entry]:
    """A sweep that is ended early has then seen as many families as possible."""
    families: dict[str, list[Entry]] = {}
    for entry in entries:
        families.setdefault(entry.family or entry.target, []).append(entry)
    for turn in range(max(map(len, families.values()))):
        yield from (members[turn] for members in families.values() if turn < len(members))
