"""The base as a folder: a temporary worktree, gone on every way out; and where a target stands on either side."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ampcheck.core.errors import UsageError
from ampcheck.speed.base.git import Repository
from ampcheck.speed.base.origin import is_installed


@dataclass(frozen=True, slots=True)
class Checkout:
    """A side as a worker needs it. root: of its files; folder: to run in; paths: to import from, before all others."""

    root: Path
    folder: Path
    paths: tuple[Path, ...]
    target: str


def repository_of(target: str) -> Repository:
    """The repository that is compared: the one around this folder, or around the target's file."""
    place = target.rpartition(":")[0]
    if place.endswith(".py") and Path(place).is_file():
        return Repository.around(Path(place).resolve().parent)
    return Repository.around(Path.cwd())


def head_of(repository: Repository, target: str) -> Checkout:
    """The working tree as it stands."""
    folder = Path.cwd().resolve()
    if not folder.is_relative_to(repository.root):
        folder = repository.root
    return Checkout(repository.root, folder, _paths(repository.root, repository.root), _moved(target, repository.root))


def base_of(repository: Repository, root: Path, head: Checkout) -> Checkout:
    """The same target in the worktree. Raises `UsageError` where the folder to run in does not exist there."""
    folder = root / head.folder.relative_to(repository.root)
    if not folder.is_dir():
        raise UsageError(f"it has no folder {head.folder.relative_to(repository.root)}, in which the target is run")
    return Checkout(root, folder, _paths(repository.root, root), head.target)


@contextmanager
def worktree(repository: Repository, commit: str) -> Iterator[Path]:
    """A checkout of a commit beside the user's own, whose files, index and branches stay as they are.

    It is removed on every way out, SIGTERM among them, but for SIGKILL; a second signal waits until that is done.
    """
    holder = Path(tempfile.mkdtemp(prefix="ampcheck-base-")).resolve()
    place = holder / repository.root.name  # under its own name, which a package's folder may be
    with _sigterm_raises():
        try:
            repository.ask("worktree", "add", "--detach", "--quiet", os.fspath(place), commit)
            yield place
        finally:
            with _signals_wait():
                _remove(repository, holder, place)


def _remove(repository: Repository, holder: Path, place: Path) -> None:
    registered = None
    with suppress(OSError, ValueError):
        registered = Path((place / ".git").read_text(encoding="utf-8").partition("gitdir:")[2].strip())
    with suppress(UsageError):
        repository.ask("worktree", "remove", "--force", os.fspath(place))
    shutil.rmtree(holder, ignore_errors=True)
    # `git worktree prune` would also forget worktrees of the user's that stand on a disk that is not there now.
    if registered is not None and registered.parent.name == "worktrees":
        shutil.rmtree(registered, ignore_errors=True)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """A CI job that is cancelled gets SIGTERM: it ends like any exception, so that nothing is left behind."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _paths(repository: Path, root: Path) -> tuple[Path, ...]:
    """Where a side's packages lie: its root, `src`, and wherever in the repository this Python imports from."""
    found = [root, *(root / name for name in ("src",) if (root / name).is_dir())]
    for entry in sys.path:
        place = Path(entry or os.curdir).resolve()
        if place.is_relative_to(repository) and not is_installed(place, repository):
            found.append(root / place.relative_to(repository))
    return tuple(dict.fromkeys(place for place in found if place.is_dir()))


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM off until the end of the block: who is impatient presses twice."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread alone
        return
    came: list[int] = []
    known = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in known.items() if handler is not None}  # None: not Python's own
    for number in before:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(came):
            signal.raise_signal(late)


def _moved(target: str, root: Path) -> str:
    """A target that names a file names it from the folder it runs in, on either side."""
    place, _, attribute = target.rpartition(":")
    if not place.endswith(".py"):
        return target
    path = Path(place).resolve()
    if not path.is_file():
        raise UsageError(f"there is no file {place}")
    if not path.is_relative_to(root):
        raise UsageError(f"the target's file is part of the repository that is compared ({root.name}); {place} is not")
    folder = Path.cwd().resolve()
    return f"{os.path.relpath(path, folder if folder.is_relative_to(root) else root)}:{attribute}"
