"""Child processes, which no hook of this process sees: each Python that is started reports through a file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampcheck.compiled.graph.child import FILE
from ampcheck.compiled.graph.records import Artifacts
from ampcheck.core.run import Where
from ampcheck.torchtools.source import is_users, short_path

_START = """\
import runpy, sys
here = {here!r}
sys.path[:] = [place for place in sys.path if place != here]
try:
    runpy.run_path({hook!r}, run_name="ampcheck_child")
except Exception:
    pass
sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize
except ImportError:
    pass
"""


@dataclass(slots=True)
class Children:
    """What child processes told. processes: those that used PyTorch; graphs: compiled in all of them together."""

    processes: int = 0
    graphs: int = 0
    artifacts: tuple[Artifacts, ...] = ()


@contextmanager
def watched_children() -> Iterator[Children]:
    """Let each Python process that is started inside report what it compiles, saves and loads.

    It finds a `sitecustomize` of ours first on `PYTHONPATH`, which goes on to its own. One that is started with `-I`,
    `-E`, `-S` or with an environment of its own, and one that is forked, reports nothing.
    """
    children = Children()
    with tempfile.TemporaryDirectory(prefix="ampcheck-") as folder:
        told = Path(folder, "told.jsonl")
        told.touch()
        hook = str(Path(__file__).with_name("child.py"))
        Path(folder, "sitecustomize.py").write_text(_START.format(here=folder, hook=hook), encoding="utf-8")
        before = {name: os.environ.get(name) for name in ("PYTHONPATH", FILE)}
        path = os.pathsep.join(part for part in (folder, before["PYTHONPATH"]) if part)
        os.environ.update({"PYTHONPATH": path, FILE: str(told)})
        try:
            yield children
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            _read(children, told.read_text(encoding="utf-8"))


def _read(children: Children, text: str) -> None:
    by_process: dict[int, list[Mapping[str, Any]]] = {}
    for line in text.splitlines():
        event = json.loads(line)
        by_process.setdefault(event["pid"], []).append(event)
    children.processes = len(by_process)
    found: list[Artifacts] = []
    for events in by_process.values():
        last = events[-1]
        children.graphs += last["graphs"]
        for event in events:
            if event["event"] != "end":
                hits, later = last["hits"] - event["hits"], last["graphs"] - event["graphs"]
                where = Where("compile")
                if is_users(event["file"]):
                    where = Where("compile", file=short_path(event["file"]), line=event["line"])
                found.append(
                    Artifacts(event["event"], event["keys"], event["graphs"], hits, later, where, "a child process")
                )
    children.artifacts = tuple(found)
