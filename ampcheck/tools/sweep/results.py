"""The results of a sweep, each in a file of its own, by which a later sweep resumes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from typing import Any

from ampcheck.core.errors import UsageError, brief, require_schema
from ampcheck.core.json_files import from_plain, parse_json
from ampcheck.core.run import Run
from ampcheck.core.settings import Target
from ampcheck.core.text import counted, listed
from ampcheck.core.worker import ENDED, MEMORY, TIME
from ampcheck.tools.sweep.folder import Folder
from ampcheck.tools.sweep.source import CodeDigests

SCHEMA = 2
"""Version of the file of a result. 1: the first; 2: the key has the code, and a result no limits."""

AUDIT, COMPILATION = "audit", "compilation"
"""Commands of a process of a sweep."""

JUDGED, REFUSED, CRASHED = "judged", "refused", "crashed"
"""Endings of an audit: with a run, with a `UsageError`, with a defect of ampcheck; or `TIME`, `MEMORY` or `ENDED`."""

_ENDINGS = (JUDGED, REFUSED, CRASHED, TIME, MEMORY, ENDED)

_MANIFEST = "sweep.manifest"

_JUDGEMENT = ("severity", "fail_on")
"""Options of a target that apply to a finished run."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Limits of one audit. seconds: of time; memory: bytes, None for any number."""

    seconds: float
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one command for a target.

    command: `AUDIT` or `COMPILATION`. ended: how; reason: why there is no run, in one line. seconds: that it took;
    memory: bytes at the peak, sampled, None where the system does not report them.
    """

    command: str
    target: str
    run: Run
    ended: str = JUDGED
    reason: str = ""
    seconds: float = 0.0
    memory: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The result as `from_json` reads it."""
        return {name: getattr(self, name) for name in _PLAIN} | {"run": self.run.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        """A result that was written. Raises `KeyError`, `TypeError` or `ValueError` for another object."""
        result = from_plain(cls, {name: data[name] for name in _PLAIN} | {"run": {}})
        if result.ended not in _ENDINGS or not 0 <= result.seconds < math.inf or (result.memory or 0) < 0:
            raise ValueError(f"no target has {result.ended!r:.20} after {result.seconds} s with {result.memory} bytes")
        return replace(result, run=Run.from_json(data["run"]))


_PLAIN = ("command", "target", "ended", "reason", "seconds", "memory")


@dataclass(frozen=True, slots=True)
class Task:
    """A command for a target.

    commit: that the target is of; empty for the working tree. settings: what else the result depends on, by name.
    """

    command: str
    target: Target
    commit: str = ""
    settings: tuple[tuple[str, Any], ...] = ()


def key_of(task: Task, code: str) -> dict[str, Any]:
    """Return what a result depends on: the task, with the target's options, the code, and the versions of torch and
    ampcheck.

    code: a digest of it, empty where the commit of the task names it.
    """
    target = task.target
    read = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(target).items()}
    options = {name: value for name, value in read.items() if name not in _JUDGEMENT}  # as JSON has it
    return {
        "command": task.command,
        "commit": task.commit,
        **options,
        **dict(task.settings),
        "code": code,
        "torch": version("torch"),
        "ampcheck": version("ampcheck"),
    }


class ResultFolder:
    """The results in a folder, or at a URL, and the manifest of the sweep that they are of. Raises as `Folder`.

    reused: how many results were loaded.
    """

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self.folder = Folder(place)
        self.reused = 0
        self._manifest = ""
        self._digests = CodeDigests()

    def load(self, task: Task) -> Result | None:
        """The result of a task that was judged with its code, options and versions; None without one that is sound."""
        result = self._result(_name(task), self.key(task))
        if result is None or result.ended != JUDGED:  # it is audited again
            return None
        self.reused += 1
        return result

    def save(self, task: Task, result: Result) -> None:
        """Write a result, in place of one of earlier code; also one that was not judged, which is never loaded."""
        data = {"schema": SCHEMA, "key": self.key(task), **result.to_json()}
        self.folder.write(_name(task), json.dumps(data, indent=1, allow_nan=False) + "\n")

    def key(self, task: Task) -> dict[str, Any]:
        """Return what the result of a task depends on."""
        return key_of(task, "" if task.commit else self._digests.of(task.target.target))

    def begin(self, planned: Iterable[tuple[Task, str]], *, shared: bool) -> str:
        """Write the manifest: each task of the whole sweep, with the family of its target.

        Returns sentences on what the sweep before had with other code, options or versions, and of other targets; or
        "". shared: with other shards: raises `UsageError` where the sweep before is not the same, or its manifest
        cannot be read.
        """
        tasks: list[dict[str, Any]] = [
            {"file": _name(t), "key": self.key(t), "family": family} for t, family in planned
        ]
        try:
            earlier = self._tasks()
        except UsageError as error:
            if shared and not isinstance(error.__cause__, FileNotFoundError):
                raise
            earlier = []
        before, now = ({_identity(entry): entry for entry in each} for each in (earlier, tasks))
        stale = [each for each in before.keys() & now.keys() if before[each]["key"] != now[each]["key"]]
        found = sorted({text for each in stale for text in changes(before[each]["key"], now[each]["key"])})
        if shared and before and (stale or before.keys() != now.keys()):
            raise UsageError(
                f"{self.folder} has results of a sweep with other settings ({listed(found) or 'other targets'}): "
                "give each shard the same list, code and options, or name another --results, or start over with --fresh"
            )
        count = sum(bool(self._data(before[each]["file"])) for each in stale)
        self._manifest = json.dumps({"schema": SCHEMA, "tasks": tasks}) + "\n"
        self.folder.write(_MANIFEST, self._manifest)
        sentences = []
        if count:
            text = f"{counted(count, 'results')} in {self.folder} {'was' if count == 1 else 'were'} found with other"
            sentences.append(f"{text} settings ({listed(found)}): the targets are audited again")
        targets = {target for _, target in now}
        if others := list(dict.fromkeys(target for _, target in before if target not in targets)):
            sentences.append(
                f"{self.folder} was of {counted(len(others), 'other targets')} too ({listed(others)}), which "
                "`ampcheck report` leaves out from now on: name another --results to keep the two sweeps apart"
            )
        return "\n".join(sentences)

    def is_current(self) -> bool:
        """Return whether no other sweep has begun here since `begin`, as it may at a URL; True before it."""
        with suppress(Exception):  # each file system has its own
            return not self._manifest or self.folder.read(_MANIFEST) == self._manifest.encode()
        return False

    def sweep(self) -> list[tuple[Target, str, Result | None]]:
        """Return the target of each task of the sweep, with its family, and with its result if that is there and sound.

        Raises `UsageError` for a folder without a manifest, and for a damaged one.
        """
        names = {each.name for each in fields(Target)}
        planned = []
        for entry in self._tasks():
            key = entry["key"]
            options: dict[str, Any] = {
                name: tuple(v) if isinstance(v, list) else v for name, v in key.items() if name in names
            }
            planned.append((Target(**options), entry["family"], self._result(entry["file"], key)))
        return planned

    def _tasks(self) -> list[dict[str, Any]]:
        """The tasks of the manifest. Raises `UsageError` for one that is not there, cannot be read or is damaged."""
        place = f"{self.folder}/{_MANIFEST}"
        try:
            data = parse_json(self.folder.read(_MANIFEST))
        except FileNotFoundError as error:
            raise UsageError(f"{self.folder} has no sweep: there is no {_MANIFEST} in it") from error
        except Exception as error:  # each file system has its own
            raise UsageError(f"{place} is no manifest of a sweep: {brief(error)}") from error
        require_schema(data, place, "manifest of a sweep", SCHEMA)
        tasks = data.get("tasks")
        if not isinstance(tasks, list) or not tasks or not all(map(_is_planned, tasks)):
            raise UsageError(f"{place} is damaged: start over with --fresh, or name another --results")
        return tasks

    def _result(self, name: str, key: Mapping[str, Any]) -> Result | None:
        data = self._data(name)
        with suppress(ValueError, KeyError, TypeError):
            require_schema(data, "this", "result of a sweep", SCHEMA)
            if data["key"] == key and (data["command"], data["target"]) == (key["command"], key["target"]):
                return Result.from_json(data)
        return None

    def _data(self, name: str) -> Any:
        """The object in a file; an empty one where there is none that is sound."""
        with suppress(Exception):  # each file system has its own
            data = parse_json(self.folder.read(name))
            return data if isinstance(data, dict) else {}
        return {}


def _is_planned(entry: object) -> bool:
    """Return whether an entry of a manifest has the fields that `begin` writes."""
    key = entry.get("key") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(key, dict):
        return False
    texts = (entry.get("file"), entry.get("family"), key.get("command"), key.get("target"))
    return all(isinstance(text, str) for text in texts)


def _identity(entry: Mapping[str, Any]) -> tuple[str, str]:
    return entry["key"]["command"], entry["key"]["target"]


def _name(task: Task) -> str:
    options = key_of(task, "")  # not the code: each edit would leave a file behind
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', task.target.target)[-80:].strip('-.')}-{digest}.json"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[str]:
    """Return what differs between the keys of two results, in words."""
    if before.get("code") != now["code"]:
        yield "code that has changed"
    for name in now:
        if name != "code" and before.get(name) != now[name]:
            yield f"{name} {_shown(before.get(name))}, now {_shown(now[name])}"


def _shown(value: object) -> str:
    return "/".join(map(str, value)) or "default" if isinstance(value, list) else str(value)
