"""The base in a temporary worktree, which is removed in any case; folder, import paths and target of either side."""

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
from ampcheck.speed.base.origin import is_installed
from ampcheck.speed.git import Repository


@dataclass(frozen=True, slots=True)
class Checkout:
    """A side as a worker needs it. root: of its files; folder: to run in; paths: to import from, before all others."""

    root: Path
    folder: Path
    paths: tuple[Path, ...]
    target: str


def repository_of(target: str) -> Repository:
    """The repository around the target's file, or around this folder."""
    path = Path(target.rpartition(":")[0])
    return Repository.around(path.resolve().parent if path.suffix == ".py" and path.is_file() else Path.cwd())


def head_of(repository: Repository, target: str) -> Checkout:
    """The working tree. A target that names a file names it from the folder it runs in, on either side."""
    root, folder = repository.root, Path.cwd().resolve()
    if not folder.is_relative_to(root):
        folder = root
    file, _, attribute = target.rpartition(":")
    if file.endswith(".py"):
        path = Path(file).resolve()
        if not path.is_file():
            raise UsageError(f"there is no file {file}")
        if not path.is_relative_to(root):
            raise UsageError(
                f"the target's file is part of the repository that is compared ({root.name}); {file} is not"
            )
        target = f"{os.path.relpath(path, folder)}:{attribute}"
    return Checkout(root, folder, _import_paths(root, root), target)


def base_of(repository: Repository, root: Path, head: Checkout) -> Checkout:
    """The same target in the worktree. Raises `UsageError` where the folder to run in does not exist there."""
    folder = root / head.folder.relative_to(repository.root)
    if not folder.is_dir():
        raise UsageError(f"it has no folder {head.folder.relative_to(repository.root)}, in which the target is run")
    return Checkout(root, folder, _import_paths(repository.root, root), head.target)


def _import_paths(repository: Path, root: Path) -> tuple[Path, ...]:
    """The root of a side, `src`, and each folder of the repository that this Python imports from."""
    paths = [root, root / "src"]
    for entry in sys.path:
        path = Path(entry or os.curdir).resolve()
        if path.is_relative_to(repository) and not is_installed(path, repository):
            paths.append(root / path.relative_to(repository))
    return tuple(dict.fromkeys(path for path in paths if path.is_dir()))


@contextmanager
def worktree(repository: Repository, commit: str) -> Iterator[Path]:
    """A temporary checkout of a commit; files, index and branches of the user's own are not touched.

    It is removed in any case, SIGTERM included and SIGKILL excepted; a second signal waits for the removal.
    """
    parent = Path(tempfile.mkdtemp(prefix="ampcheck-base-")).resolve()
    folder = parent / repository.root.name  # under its own name, which may be that of a package
    with _sigterm_raises():
        try:
            repository.output("worktree", "add", "--detach", "--quiet", os.fspath(folder), commit)
            yield folder
        finally:
            with _signals_wait():
                _remove(repository, parent, folder)


def _remove(repository: Repository, parent: Path, folder: Path) -> None:
    registered = None
    with suppress(OSError, ValueError):
        registered = Path((folder / ".git").read_text(encoding="utf-8").partition("gitdir:")[2].strip())
    with suppress(UsageError):
        repository.output("worktree", "remove", "--force", os.fspath(folder))
    shutil.rmtree(parent, ignore_errors=True)
    # `git worktree prune` would also remove the user's worktrees on a disk that is not mounted now.
    if registered is not None and registered.parent.name == "worktrees":
        shutil.rmtree(registered, ignore_errors=True)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()  # only this thread handles signals


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """A cancelled CI job gets SIGTERM: raise SystemExit, so that the worktree is removed."""
    if not _in_main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM until the end of the block."""
    if not _in_main_thread():
        yield
        return
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if handler is not None}  # None: not Python's
    for number in handlers:
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(received):
            signal.raise_signal(late)
