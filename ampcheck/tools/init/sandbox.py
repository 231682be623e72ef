"""A copy of the repository, in which its code may run, and what was tried there."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ampcheck.core.errors import UsageError
from ampcheck.core.worker import TIME, Worker, WorkerEndedError
from ampcheck.tools.init.candidates import Candidate
from ampcheck.tools.init.sources import Attempt

ENOUGH = 2
"""Models that get a factory."""

_HEAVY_TRIED = 3
"""So many more models are tried for one whose tests take no minutes: a folder of many models has small ones."""

_FILE_BYTES = 20_000_000
"""A larger file is left out: it is data or a checkpoint."""

_COPY_BYTES = 500_000_000
"""Bytes up to which files are copied; of more, Python's alone."""

_FILES = 20_000
"""Files that are copied; of more, Python's alone."""

_SECONDS = 60.0
"""CPU time for one candidate, for a lock, and for the first steps of a training script."""

_WAIT = 300.0
"""Wall time for a lock, and for the first steps of a training script; a busy machine needs minutes for seconds."""

_TOTAL_SECONDS = 600.0
"""Wall time for all of them: what waits uses no CPU time."""

_OFFLINE = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1"),
    "WANDB_MODE": "disabled",
}


@dataclass(frozen=True, slots=True)
class Tried:
    """Outcome of a candidate. attempt: that ran, None if none did. inputs: as code. error: why none ran. heavy: one
    pass takes so many FLOPs that compiled code would take minutes."""

    candidate: Candidate
    attempt: Attempt | None = None
    inputs: str = ""
    parameters: int = 0
    error: str = ""
    heavy: bool = False


@contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """A copy of a repository without its hidden folders and large files, removed at the end.

    Every file is a real copy: a link would let the code that runs there overwrite the user's file.
    """
    with TemporaryDirectory(prefix="ampcheck-init-", ignore_cleanup_errors=True) as temporary:
        target = Path(temporary, folder.name or "repository")
        count = size = 0
        for parent, folders, files in os.walk(folder):
            if "pyvenv.cfg" in files:
                folders.clear()
                continue
            folders[:] = [name for name in folders if not name.startswith(".") and name != "node_modules"]
            into = target / Path(parent).relative_to(folder)
            into.mkdir(parents=True, exist_ok=True)
            for name in files:
                source = Path(parent, name)
                with suppress(OSError):
                    if not source.is_file():  # a device or a pipe, which has no end
                        continue
                    length = source.stat().st_size
                    fits = length <= _FILE_BYTES and count < _FILES and size + length <= _COPY_BYTES
                    if fits or name.endswith(".py"):
                        shutil.copyfile(source, into / name)
                        count, size = count + 1, size + length
        yield target


def import_paths(repository: Path, packages: Mapping[str, Collection[str]]) -> list[str]:
    """The folders that must be on `sys.path`, of those relative ones that have top-level packages in use.

    Those of an editable installation need not be: they are found without the working directory and PYTHONPATH.
    """
    given = ("", *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    installed = [path for path in sys.path if os.path.abspath(path) not in set(map(os.path.abspath, given))]

    def is_installed(root: Path, name: str) -> bool:
        specs = (
            PathFinder.find_spec(name, installed) if finder is PathFinder else finder.find_spec(name, None)
            for finder in sys.meta_path
        )
        spec = next((spec for spec in specs if spec is not None), None)
        places = [spec.origin, *(spec.submodule_search_locations or ())] if spec is not None else []
        return any(Path(place).resolve().is_relative_to(root.resolve()) for place in places if place)

    return [
        root
        for root, used in packages.items()
        if used and not all(is_installed(repository / root, name) for name in used)
    ]


class Process:
    """The process that runs the repository's code in a copy of it, entered as a context; its libraries are offline.

    One serves for all: what the code imports takes seconds. Where it ended, the next question starts another.
    """

    def __init__(self, copy: Path) -> None:
        self._copy = copy
        self._worker: Worker | None = None

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.kill()  # PyTorch's own end takes seconds

    def ask(self, command: str, timeout: float, **arguments: Any) -> Any:
        """The answer of a command of `trial`. Raises `UsageError` where the process ended or took longer."""
        if self._worker is None:
            # PYTHONPATH gets absolute folders, as it runs elsewhere.
            paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
            env = {**_OFFLINE, "PYTHONPATH": os.pathsep.join(paths)}
            self._worker = Worker("ampcheck.tools.init.trial", name="its process", cwd=self._copy, env=env)
        try:
            return self._worker.ask(command, timeout=timeout, **arguments)
        except UsageError:
            self._worker.kill()
            self._worker = None
            raise

    def why_not(self, command: str, **arguments: str) -> str:
        """Why a command for one target did nothing, in a line; "" where it did."""
        try:
            reason: str = self.ask(command, _WAIT, seconds=_SECONDS, **arguments)
        except UsageError as error:
            return _reason(error)
        return reason


def try_all(copy: Path, candidates: Sequence[Candidate], process: Process, show: Callable[[str], None]) -> list[Tried]:
    """Build and run the candidates in the copy until `ENOUGH` of them run, and up to `_HEAVY_TRIED` more where some are
    heavy; those that were not reached are left out.

    show: called with each one that begins.
    """
    ready = [each for each in candidates if each.attempts]
    lacking = [Tried(each, error=f"required: {', '.join(each.missing)}") for each in candidates if not each.attempts]
    paths = [str(copy / root) for root in dict.fromkeys(candidate.root for candidate in candidates)]
    tried, end = list[Tried](), time.monotonic() + _TOTAL_SECONDS
    for candidate in ready:
        show(f"trying {candidate.title} in a copy")
        attempts, left = list(map(asdict, candidate.attempts)), max(end - time.monotonic(), 0.0)
        try:
            answer = process.ask("build", left, paths=paths, attempts=attempts, seconds=_SECONDS)
        except UsageError as error:
            tried.append(Tried(candidate, error=_reason(error)))
            break
        ran = answer.pop("number", None)
        tried.append(Tried(candidate, None if ran is None else candidate.attempts[ran], **answer))
        heavy = [each.heavy for each in tried if each.attempt is not None]
        if heavy.count(False) == ENOUGH or len(heavy) == ENOUGH + _HEAVY_TRIED:
            break
    return [*tried, *lacking]


def _reason(error: UsageError) -> str:
    """Why nothing is tried after this, in a line."""
    if isinstance(error, WorkerEndedError) and error.why == TIME:
        return f"all candidates together took longer than {_TOTAL_SECONDS:g} s"
    first, *printed = str(error).splitlines()
    return ": ".join((first.removesuffix("; it printed last:"), *(line.strip() for line in printed[-1:])))
