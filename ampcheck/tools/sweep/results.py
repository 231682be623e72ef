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
from ampcheck.tools.sweep.source import CodeDigests

SCHEMA = 2
"""Version of the file of a result. 1: the first; 2: the key has the code, and a result no limits."""

AUDIT, COMPILATION = "audit", "compilation"
"""Commands of a process of a sweep."""

JUDGED, REFUSED, CRASHED = "judged", "refused", "crashed"
"""How an audit ended: with a run, with a `UsageError`, with a defect of ampcheck; or `TIME`, `MEMORY` or `ENDED`."""

_JUDGEMENT = ("severity", "fail_on")
"""Options of a target that apply to a finished run."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one audit may use. seconds: of time; memory: bytes, None for any number."""

    seconds: float
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What one command found of a target.

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
    """What a result depends on: the task, with the target's options, the code, and the versions of torch and ampcheck.

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
    """The results in a folder, which is created for the first one. Raises `UsageError` for a path of another kind.

    reused: how many results were loaded.
    """

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise UsageError(f"the results of a sweep need a folder; {path} is a file")
        self.path = path
        self.reused = 0
        self._digests = CodeDigests()

    def load(self, task: Task) -> Result | None:
        """The result of a task that was judged with its code, options and versions; None without one that is sound."""
        with suppress(OSError, ValueError, KeyError, TypeError, UsageError):  # it is audited again
            data = read_json(self._file(task))
            require_schema(data, "this", "result of a sweep", SCHEMA)
            if data["key"] == self._key(task) and data["ended"] == JUDGED:
                known = {name: data[name] for name in ("command", "target", "ended", "reason", "seconds", "memory")}
                result = Result(**known, run=Run.from_json(data["run"]))
                self.reused += 1
                return result
        return None

    def save(self, task: Task, result: Result) -> None:
        """Write a result, in place of one of earlier code; also one that was not judged, which is never loaded."""
        data = {"schema": SCHEMA, "key": self._key(task), **asdict(result), "run": result.run.to_json()}
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
        """A sentence on results of these tasks with other code, options or versions, which are not used; or ""."""
        keys = {(task.command, task.target.target): self._key(task) for task in tasks}
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
            f"{counted(stale, 'results')} in {self.path} {'was' if stale == 1 else 'were'} found with other settings "
            f"({listed(changed)}): the targets are audited again"
        )

    def _key(self, task: Task) -> dict[str, Any]:
        return key_of(task, "" if task.commit else self._digests.of(task.target.target))

    def _file(self, task: Task) -> Path:
        options = key_of(task, "")  # not the code: each edit would leave a file behind
        digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:12]
        return self.path / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', task.target.target)[-80:].strip('-.')}-{digest}.json"


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[str]:
    if before.get("code") != now["code"]:
        yield "code that has changed"
    for name in now:
        if name != "code" and before.get(name) != now[name]:
            yield f"{name} {_shown(before.get(name))}, now {_shown(now[name])}"


def _shown(value: object) -> str:
    return "/".join(map(str, value)) or "default" if isinstance(value, list) else str(value)
