"""The results of a sweep, each in a file of its own, by which a later sweep resumes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ampcheck.core.errors import UsageError, require_schema
from ampcheck.core.files import write_atomically
from ampcheck.core.json_files import read_json
from ampcheck.core.run import Run
from ampcheck.core.settings import Target
from ampcheck.core.text import counted, listed
from ampcheck.core.worker import MEMORY, TIME

SCHEMA = 1
"""Version of the file of a result. 1: the first."""

AUDIT, COMPILATION = "audit", "compilation"
"""Commands of a process of a sweep."""

JUDGED, REFUSED, CRASHED = "judged", "refused", "crashed"
"""How an audit ended: with a run, with a `UsageError`, with a defect of ampcheck; or `TIME`, `MEMORY` or `ENDED`."""

_JUDGEMENT = ("severity", "fail_on")
"""Options of a target that apply to a finished run."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one audit may use. seconds: of time; memory: bytes, None for any number."""

    seconds: float
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What one command found of a target.

    command: `AUDIT` or `COMPILATION`. ended: how; reason: why there is no run, in one line. seconds: that it took;
    memory: bytes at the peak, sampled, None where the system does not report them. limits: that it had.
    """

    command: str
    target: str
    run: Run
    ended: str = JUDGED
    reason: str = ""
    seconds: float = 0.0
    memory: int | None = None
    limits: Limits = Limits(0.0)

    def again(self, limits: Limits) -> bool:
        """Whether it hit a limit that is higher now."""
        if self.ended == MEMORY:
            return limits.memory is None or (self.limits.memory is not None and limits.memory > self.limits.memory)
        return self.ended == TIME and limits.seconds > self.limits.seconds


@dataclass(frozen=True, slots=True)
class Task:
    """A command for a target. commit: that the target is of; empty for the working tree."""

    command: str
    target: Target
    commit: str = ""


def key_of(task: Task) -> dict[str, Any]:
    """What a result depends on: the task, with the target's options, and the versions of torch and ampcheck."""
    target = task.target
    options = {name: value for name, value in asdict(target).items() if name not in _JUDGEMENT}
    options["dtype"] = list(target.dtype)
    return {
        "command": task.command,
        "commit": task.commit,
        **options,
        "torch": version("torch"),
        "ampcheck": version("ampcheck"),
    }


class ResultFolder:
    """The results in a folder, which is created for the first one. Raises `UsageError` for a path of another kind."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise UsageError(f"the results of a sweep need a folder; {path} is a file")
        self.path = path

    def load(self, task: Task) -> Result | None:
        """The result of a task with its options and versions; None where there is none, or a damaged one."""
        with suppress(OSError, ValueError, KeyError, TypeError, UsageError):  # it is audited again
            data = read_json(self._file(task))
            require_schema(data, "this", "result of a sweep", SCHEMA)
            if data["key"] == key_of(task):
                known = {name: data[name] for name in ("command", "target", "ended", "reason", "seconds", "memory")}
                return Result(**known, run=Run.from_json(data["run"]), limits=Limits(**data["limits"]))
        return None

    def save(self, task: Task, result: Result) -> None:
        """Write a result."""
        data = {"schema": SCHEMA, "key": key_of(task), **asdict(result), "run": result.run.to_json()}
        self.write(self._file(task).name, json.dumps(data, indent=1, allow_nan=False) + "\n")

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder, as a whole or not at all."""
        try:
            if not self.path.is_dir():
                self.path.mkdir(parents=True)
                (self.path / ".gitignore").write_text("*\n", encoding="utf-8")  # it is usually made in a repository
        except OSError as error:
            raise UsageError(f"the folder {self.path} of results cannot be created: {error.strerror}") from error
        write_atomically(self.path / name, text)

    def others(self, tasks: Iterable[Task]) -> str:
        """A sentence on results of these tasks with other options or versions, which are not used; "" without any."""
        keys = {(task.command, task.target.target): key_of(task) for task in tasks}
        changed: dict[str, None] = {}
        stale = 0
        for path in sorted(self.path.glob("*.json")) if self.path.is_dir() else ():
            with suppress(OSError, ValueError, KeyError, TypeError):
                before = read_json(path)["key"]
                now = keys.get((before["command"], before["target"]))
                if now is not None and now != before:
                    stale += 1
                    changed.update(dict.fromkeys(_changes(before, now)))
        if not stale:
            return ""
        return (
            f"{counted(stale, 'results')} in {self.path} were found with other settings ({listed(changed)}): they stay "
            "there, and their targets are audited again"
        )

    def _file(self, task: Task) -> Path:
        digest = hashlib.sha256(json.dumps(key_of(task), sort_keys=True).encode()).hexdigest()[:12]
        return self.path / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', task.target.target)[-80:].strip('-.')}-{digest}.json"


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[str]:
    for name in now:
        if before.get(name) != now[name]:
            yield f"{name} {_shown(before.get(name))}, now {_shown(now[name])}"


def _shown(value: object) -> str:
    return "/".join(map(str, value)) or "default" if isinstance(value, list) else str(value)
