"""What a comparison asks git: where the repository is, which commit a revision names, what is not committed."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ampcheck.core.errors import UsageError, brief
from ampcheck.speed.base.stats import Side

_AIMED_ELSEWHERE = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_COMMON_DIR",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
)
"""What git sets for its hooks: a hook that measures means the repository that it stands in."""


MERGE_BASE = "merge base"
"""How a base was got that is not the revision itself."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A git repository with a working tree. root: the folder of the working tree, symbolic links resolved."""

    root: Path

    @classmethod
    def around(cls, folder: Path) -> Repository:
        """The repository that holds a folder. Raises `UsageError` where there is none."""
        done = _run(["rev-parse", "--show-toplevel"], folder)
        if done.returncode:
            raise UsageError(
                f"--base compares two revisions of a git repository, and {folder} is in none: {_said(done)}"
            )
        return cls(Path(done.stdout.strip()).resolve())

    def ask(self, *arguments: str) -> str:
        """What a git command prints, its last line end removed. Raises `UsageError` with what git says."""
        done = _run(arguments, self.root)
        if done.returncode:
            raise UsageError(f"git {arguments[0]} failed: {_said(done)}")
        return done.stdout.rstrip("\n")

    def commit(self, revision: str) -> str:
        """The full name of the commit that a revision names. Raises `UsageError` where there is none."""
        found = self._found(revision)
        if not found:
            there = next((name for name in (f"origin/{revision}", f"upstream/{revision}") if self._found(name)), "")
            told = f"the base is a commit, branch or tag of this repository, and there is no {revision!r} in it"
            told += f", but there is {there}" if there else ""
            shallow = self._says("rev-parse", "--is-shallow-repository") == "true"
            told += "; this is a shallow clone" if shallow else ""
            raise UsageError(f"{told}: fetch it first (in a GitHub workflow: actions/checkout with fetch-depth: 0)")
        return found

    def start(self, revision: str, commit: str) -> tuple[str, str]:
        """The commit to compare HEAD with, and how it was got: "", or `merge base`.

        Where the revision has gone on since, what it gained is no loss of the head's: then it is where both parted.
        Raises `UsageError` where a shallow clone does not hold that commit.
        """
        head = self._says("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
        if not head or not _run(["merge-base", "--is-ancestor", commit, head], self.root).returncode:
            return commit, ""
        if parted := self._says("merge-base", commit, head):
            return parted, MERGE_BASE
        if self._says("rev-parse", "--is-shallow-repository") == "true":
            raise UsageError(
                f"where the head parted from {revision!r} must be known, and this is a shallow clone that does not "
                "hold that commit: fetch more (in a GitHub workflow: actions/checkout with fetch-depth: 0)"
            )
        return commit, ""  # two histories that have nothing in common

    def changed(self, commit: str) -> list[str]:
        """Files of the working tree that differ from a commit, those that git does not know yet among them."""
        tracked = self.ask("diff", "--name-only", "--no-relative", "--no-renames", "--no-ext-diff", commit).splitlines()
        new = self.ask("ls-files", "--others", "--exclude-standard").splitlines()
        return sorted({*tracked, *new})

    def files(self, commit: str = "") -> list[str]:
        """The files of a commit; without one those of the working tree, but for ignored ones."""
        if commit:
            return self._says("ls-tree", "-r", "--name-only", commit).splitlines()
        return self._says("ls-files", "--cached", "--others", "--exclude-standard").splitlines()

    def _found(self, revision: str) -> str:
        if revision.startswith("-"):
            return ""
        return self._says("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")

    def base(self, revision: str, commit: str, how: str = "") -> Side:
        """The side of a commit. how: as of `start`."""
        return Side(revision, commit[:10], self._says("log", "-1", "--format=%s", commit), how=how)

    def head(self) -> Side:
        """The side of the working tree as it stands, committed or not."""
        commit = self._says("rev-parse", "--verify", "--quiet", "HEAD")
        changed = self.ask("status", "--porcelain", "--untracked-files=normal").splitlines()
        name = self._says("symbolic-ref", "--quiet", "--short", "HEAD") or "HEAD"
        return Side(name, commit[:10], self._says("log", "-1", "--format=%s"), len(changed))

    def _says(self, *arguments: str) -> str:
        done = _run(arguments, self.root)
        return done.stdout.strip() if not done.returncode else ""

    def built(self) -> list[str]:
        """Compiled extensions that git does not track, which a fresh checkout lacks."""
        kinds = ("*.so", "*.pyd", "*.dylib")
        found = self._says("ls-files", "--others", "--", *kinds).splitlines()  # also ignored ones: no exclusions given
        return [name for name in found if "site-packages/" not in name]

    def pointers(self, checkout: Path) -> list[str]:
        """Files of a checkout that Git LFS keeps elsewhere and that hold a pointer only."""
        kept = self._says("-C", os.fspath(checkout), "ls-files", ":(attr:filter=lfs)").splitlines()
        return [name for name in kept if _is_pointer(checkout / name)]

    def submodules(self, commit: str) -> list[str]:
        """Paths of the submodules of a commit; a worktree has empty folders there."""
        lines = self._says("ls-tree", "-r", commit).splitlines()
        return [line.partition("\t")[2] for line in lines if line.startswith("160000 ")]


def _is_pointer(path: Path) -> bool:
    try:
        with open(path, "rb") as stream:
            return stream.read(24).startswith(b"version https://git-lfs")
    except OSError:
        return False


def _run(arguments: list[str] | tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if name not in _AIMED_ELSEWHERE}
    known |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}  # the index is not even refreshed
    # No hook of the repository runs for our sake.
    command = ["git", "-c", f"core.hooksPath={os.devnull}", "-c", "core.quotePath=false", *arguments]
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=known,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at a terminal does not reach it: what removes a worktree is left to end
        )
    except OSError as error:
        raise UsageError(f"--base needs git, which could not be started: {brief(error)}") from error


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith(("fatal", "error"))), lines[-1] if lines else "no word")
