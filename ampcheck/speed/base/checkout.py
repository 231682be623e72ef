"""The base in a temporary worktree, which is removed in any case; folder, import paths and target of either side.

A side that imports code from outside its checkout does not measure the change: where modules came from is checked.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ampcheck.core.errors import UsageError
from ampcheck.core.exit import sigterm_raises
from ampcheck.core.git import Repository
from ampcheck.core.text import listed
from ampcheck.core.worker import Worker


@dataclass(frozen=True, slots=True)
class Checkout:
    """A side as a worker needs it. root: of its files; folder: to run in; paths: to import from, before all others;
    python: the interpreter."""

    root: Path
    folder: Path
    paths: tuple[Path, ...]
    target: str
    python: str = sys.executable

    def worker(self, commands: str, name: str, memory: int | None = None) -> Worker:
        """A process that runs here. commands, name, memory: as of `Worker`."""
        env = {"PYTHONDONTWRITEBYTECODE": "1"}  # nothing is written into the user's checkout
        places: dict[str, Any] = {"cwd": self.folder, "pythonpath": self.paths, "python": self.python}
        return Worker(commands, name=name, env=env, memory=memory, **places)


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
    with sigterm_raises(SystemExit(128 + signal.SIGTERM)):  # of a cancelled CI job
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


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM until the end of the block."""
    if threading.current_thread() is not threading.main_thread():  # only this thread handles signals
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


_THIRD_PARTY = frozenset(("third_party", "vendor", "vendored", "_vendor", "external", "extern", "submodules"))
"""Folders of copies of other projects; the installed one is imported on purpose, maybe."""


def is_installed(path: Path, root: Path) -> bool:
    """Return whether a path below `root` belongs to Python or to an environment inside the repository.

    Not by `sys.prefix`: a system's Python has /usr, and a repository may be in /usr/src.
    """
    parts = path.relative_to(root).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    known = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    libraries = {Path(name).resolve() for name in known if name}
    return any(library.is_relative_to(root) and path.is_relative_to(library) for library in libraries)


def is_inside(origin: str, root: Path) -> bool:
    """Return whether a module's file is one of the checkout's own."""
    if not os.path.isabs(origin):  # modules that PyTorch generates, such as torch.ops
        return False
    path = Path(origin).resolve()
    return path.is_relative_to(root) and not is_installed(path, root)


def _imported() -> Iterable[tuple[str, str]]:
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if isinstance(origin, str):
            yield name, origin


def require_origin(target: str, root: Path, repository: Path) -> None:
    """Raise `UsageError` where the target, or any module of the repository, was imported from outside the checkout.

    An editable install of a package leads to the user's own checkout, and the head would be compared with itself.
    """
    module = target.rpartition(":")[0]
    if not module.endswith(".py"):
        origin = getattr(sys.modules.get(module), "__file__", None)
        if origin is None or not is_inside(origin, root):
            raise UsageError(
                f"{module} must be imported from the checkout that is measured, and came from {origin or 'no file'}: "
                "put its folder on PYTHONPATH, or name a file of the repository, path/to/file.py:function"
            )
    if root == repository:
        return
    for name, origin in _imported():
        if name.partition(".")[0] != "ampcheck" and is_inside(origin, repository):
            raise UsageError(
                f"{name} must be imported from the checkout that is measured, and came from the working tree of the "
                f"head ({os.path.relpath(origin, repository)}): put its folder on PYTHONPATH"
            )


def loaded_modules(root: Path, names: Collection[str]) -> dict[str, str]:
    """Modules of this process, name to file: those of the checkout, and those with a top-level name in `names`."""
    return {name: origin for name, origin in _imported() if name.partition(".")[0] in names or is_inside(origin, root)}


@dataclass(frozen=True, slots=True)
class Sources:
    """The Python files of a checkout. tails: path by which an import may find a file (`pack/inner.py`), to files below
    the root."""

    tails: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, files: Iterable[str]) -> Sources:
        """Of paths below the root of a checkout, with `/` between their parts."""
        sources = {name for name in files if name.endswith(".py")}
        tails = defaultdict[str, tuple[str, ...]](tuple)
        for name in sorted(sources):
            parts = PurePosixPath(name).parts
            for start in range(len(parts)):
                # A package's own folder is no root of imports: pip/_vendor/six.py is never imported as `six`.
                if not start or "/".join((*parts[:start], "__init__.py")) not in sources:
                    tails["/".join(parts[start:])] += (name,)
        return cls(tails)

    @property
    def names(self) -> list[str]:
        """Top-level names of imports of these files, except ampcheck, which the workers import from elsewhere."""
        return sorted({tail.partition("/")[0].removesuffix(".py") for tail in self.tails} - {"ampcheck"})

    def strays(self, loaded: Mapping[str, str], root: Path, changed: Collection[str]) -> dict[str, str]:
        """Modules that were loaded from outside although the checkout contains their source: module to source.

        The name alone may be a coincidence: at least half of the loaded modules of a package must have a source, and a
        module without a package, or in a third-party folder, must have `changed`.
        """
        sources: dict[str, dict[str, str]] = defaultdict(dict)
        outside = Counter[str]()
        for name, origin in loaded.items():
            top = name.partition(".")[0]
            if top == "ampcheck" or not origin.endswith(".py") or is_inside(origin, root):
                continue
            outside[top] += 1
            if source := self._source(name, Path(origin).name == "__init__.py", changed):
                sources[top][name] = source
        strays = (modules for top, modules in sources.items() if 2 * len(modules) >= outside[top])
        return {name: source for modules in strays for name, source in modules.items()}

    def _source(self, name: str, package: bool, changed: Collection[str]) -> str:
        files = self.tails.get(name.replace(".", "/") + ("/__init__.py" if package else ".py"), ())
        likely = [file for file in files if not _THIRD_PARTY.intersection(file.split("/"))]
        candidates = [file for file in files if file in changed] + (likely if package or "." in name else [])
        return candidates[0] if candidates else ""


def describe_strays(strays: Mapping[str, str], loaded: Mapping[str, str]) -> str:
    """One sentence on modules from elsewhere, and the folder to put on PYTHONPATH."""
    name, source = min(strays.items())
    more = f" and {len(strays) - 1} more of the repository's modules" if len(strays) > 1 else ""
    depth = name.count(".") + (2 if source.endswith("/__init__.py") else 1)
    folder = "/".join(source.split("/")[:-depth]) or "."
    return (
        f"{name}{more} must be imported from the checkout that is measured ({source}), and came from {loaded[name]}, "
        f"which is the same code on both sides: put its folder ({folder}) on PYTHONPATH"
    )


def own_files(loaded: Mapping[str, str], root: Path) -> set[str]:
    """Paths below the root of modules from the checkout."""
    inside = (Path(origin).resolve() for origin in loaded.values() if is_inside(origin, root))
    return {path.relative_to(root).as_posix() for path in inside}


def describe_idle(changed: Collection[str], loaded: Collection[str]) -> str:
    """A clause where neither side imported a file that differs; "" where one did."""
    if not changed or not set(changed).isdisjoint(loaded):
        return ""
    files = "the file that differs" if len(changed) == 1 else f"the {len(changed)} files that differ"
    return f"neither side imported {files} ({listed(sorted(changed), 3)})"
