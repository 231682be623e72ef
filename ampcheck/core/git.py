"""Queries to git: the root of the repository, the commit of a revision, files that differ; no hook of it runs."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ampcheck.core.errors import UsageError, brief

_HOOK_VARIABLES = {
    f"GIT_{name}"
    for name in ("DIR", "WORK_TREE", "INDEX_FILE", "OBJECT_DIRECTORY", "COMMON_DIR", "NAMESPACE", "PREFIX")
}
"""Set by git for its hooks; a measurement inside a hook is of the repository around the target."""

_FETCH = "(in a GitHub workflow: actions/checkout with fetch-depth: 0)"


@dataclass(frozen=True, slots=True)
class Side:
    """The code of a side. name: as passed by the user; revision: the abbreviated commit; title: its first line;
    changed: files that differ from the commit; how: `merge base` where the commit is that of the name and the head."""

    name: str
    revision: str
    title: str = ""
    changed: int = 0
    how: str = ""

    def __str__(self) -> str:
        name = f"{self.how} with {self.name}" if self.how else self.name
        return self.revision if name in (self.revision, "") else f"{name}, {self.revision}"


@dataclass(frozen=True, slots=True)
class Repository:
    """A git repository with a working tree. root: the folder of the working tree, symbolic links resolved."""

    root: Path

    @classmethod
    def around(cls, folder: Path) -> Repository:
        """The repository that contains a folder. Raises `UsageError` where there is none."""
        done = _run(["rev-parse", "--show-toplevel"], folder)
        if done.returncode:
            raise UsageError(f"commits are compared in a git repository, and {folder} is in none: {_error(done)}")
        return cls(Path(done.stdout.strip()).resolve())

    def output(self, *arguments: str) -> str:
        """The output of a git command. Raises `UsageError` with git's message."""
        done = _run(arguments, self.root)
        if done.returncode:
            raise UsageError(f"git {arguments[0]} failed: {_error(done)}")
        return done.stdout.rstrip("\n")

    def commit(self, revision: str) -> str:
        """The full name of the commit of a revision. Raises `UsageError` where there is none."""
        if commit := self._commit(revision):
            return commit
        remote = next((name for name in (f"origin/{revision}", f"upstream/{revision}") if self._commit(name)), "")
        message = f"a commit, branch or tag of this repository is needed, and there is no {revision!r} in it"
        message += f", but there is {remote}" if remote else ""
        message += "; this is a shallow clone" if self._is_shallow else ""
        raise UsageError(f"{message}: fetch it first {_FETCH}")

    def start(self, revision: str, commit: str) -> tuple[str, str]:
        """The commit to compare HEAD with, and how it was found: "", or `merge base`.

        Commits that the revision gained since the head branched off are no loss of the head, so that it is compared
        with the merge base. Raises `UsageError` where a shallow clone lacks that commit.
        """
        head = self._commit("HEAD")
        if not head or not _run(["merge-base", "--is-ancestor", commit, head], self.root).returncode:
            return commit, ""
        if merge_base := self._try("merge-base", commit, head):
            return merge_base, "merge base"
        if self._is_shallow:
            raise UsageError(
                f"where the head parted from {revision!r} must be known, and this is a shallow clone that lacks that "
                f"commit: fetch more {_FETCH}"
            )
        return commit, ""  # unrelated histories

    def changed(self, commit: str) -> list[str]:
        """Files of the working tree that differ from a commit, untracked ones included."""
        tracked = self.output("diff", "--name-only", "--no-relative", "--no-renames", "--no-ext-diff", commit)
        untracked = self.output("ls-files", "--others", "--exclude-standard")
        return sorted({*tracked.splitlines(), *untracked.splitlines()})

    def state(self) -> str:
        """A digest of HEAD, of the changes of tracked files, and of the untracked Python files that are not ignored.

        Raises `UsageError` where there is no commit yet.
        """
        changes = self.output("diff", "--full-index", "--no-ext-diff", "--no-textconv", "HEAD")  # names each content
        parts = [self.commit("HEAD"), changes]
        for name in self.output("ls-files", "--others", "--exclude-standard", "--", "*.py").splitlines():
            path = self.root / name
            parts += [name, hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def files(self, commit: str = "") -> list[str]:
        """The files of a commit; without one those of the working tree, except ignored ones."""
        tree = ("ls-tree", "-r", "--name-only", commit)
        return self._try(*(tree if commit else ("ls-files", "--cached", "--others", "--exclude-standard"))).splitlines()

    def base(self, revision: str, commit: str, how: str = "") -> Side:
        """The side of a commit. how: as of `start`."""
        return Side(revision, commit[:10], self._try("log", "-1", "--format=%s", commit), how=how)

    def head(self) -> Side:
        """The side of the working tree, uncommitted changes included."""
        changed = self.output("status", "--porcelain", "--untracked-files=normal").splitlines()
        name = self._try("symbolic-ref", "--quiet", "--short", "HEAD") or "HEAD"
        return Side(name, self._commit("HEAD")[:10], self._try("log", "-1", "--format=%s"), len(changed))

    @property
    def _is_shallow(self) -> bool:
        return self._try("rev-parse", "--is-shallow-repository") == "true"

    def _commit(self, revision: str) -> str:
        if revision.startswith("-"):
            return ""
        return self._try("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")

    def dirty(self, besides: Path | None = None) -> bool | None:
        """Return whether tracked files differ from HEAD, except those in the folder `besides`; None where git fails."""
        paths = [":(top)"]
        if besides is not None and besides.resolve().is_relative_to(self.root) and besides.resolve() != self.root:
            paths.append(f":(top,exclude,literal){besides.resolve().relative_to(self.root).as_posix()}")
        done = _run(["status", "--porcelain", "--untracked-files=no", "--", *paths], self.root)
        return None if done.returncode else bool(done.stdout.strip())

    def _try(self, *arguments: str) -> str:
        done = _run(arguments, self.root)
        return done.stdout.strip() if not done.returncode else ""


def _run(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in _HOOK_VARIABLES}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}  # do not refresh the index
    command = ["git", "-c", f"core.hooksPath={os.devnull}", "-c", "core.quotePath=false", *arguments]
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C does not reach it: the removal of a worktree completes
        )
    except OSError as error:
        raise UsageError(f"git is needed, and could not be started: {brief(error)}") from error


def _error(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith(("fatal", "error"))), lines[-1] if lines else "no message")
