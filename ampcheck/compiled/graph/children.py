"""Child processes, which this process cannot profile: each Python that starts reports through a file."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampcheck.compiled.graph.startup_hook import EVENTS
from ampcheck.compiled.graph.stats import Artifacts
from ampcheck.core.run import Where
from ampcheck.torchtools.source import is_users, short_path


@dataclass(slots=True)
class Children:
    """processes: child processes that used PyTorch; graphs: compiled in all of them together."""

    processes: int = 0
    graphs: int = 0
    artifacts: tuple[Artifacts, ...] = ()


@contextmanager
def recorded_children() -> Iterator[Children]:
    """Record what each Python process that is started inside compiles, saves and loads.

    It finds our `sitecustomize` first on `PYTHONPATH`, which then imports its own. A process that is started with `-I`,
    `-E`, `-S` or an environment of its own, and one that is forked, is not recorded.
    """
    children, before = Children(), os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory(prefix="ampcheck-") as folder:
        events = Path(folder, EVENTS)
        events.touch()
        shutil.copy(Path(__file__).with_name("startup_hook.py"), Path(folder, "sitecustomize.py"))
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (folder, before) if part)
        try:
            yield children
        finally:
            if before is None:
                os.environ.pop("PYTHONPATH", None)
            else:
                os.environ["PYTHONPATH"] = before
            _read(children, events.read_text(encoding="utf-8"))


def _read(children: Children, text: str) -> None:
    by_process: dict[int, list[Mapping[str, Any]]] = {}
    for event in map(json.loads, text.splitlines()):
        by_process.setdefault(event["pid"], []).append(event)
    children.processes = len(by_process)
    artifacts: list[Artifacts] = []
    for events in by_process.values():
        last = events[-1]
        children.graphs += last["graphs"]
        for event in (event for event in events if event["event"] != "end"):
            hits, later = last["hits"] - event["hits"], last["graphs"] - event["graphs"]
            where = Where("compile")
            if is_users(event["file"]):
                where = Where("compile", file=short_path(event["file"]), line=event["line"])
            artifacts.append(
                Artifacts(event["event"], event["keys"], event["graphs"], hits, later, where, "a child process")
            )
    children.artifacts = tuple(artifacts)
