"""The commits of a range, each in a temporary worktree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ampcheck.core.errors import UsageError
from ampcheck.core.git import Repository
from ampcheck.core.settings import Target
from ampcheck.core.subject import split_member
from ampcheck.speed.base.checkout import Checkout, Sources, base_of, head_of, repository_of, worktree
from ampcheck.tools.bisect.versions import Version, Versions


@dataclass(frozen=True, kw_only=True)
class Commits(Versions):
    """The commits of a range. head: the user's own checkout."""

    git: Repository
    head: Checkout

    @classmethod
    def of(cls, target: Target, commits: str) -> Commits:
        """The commits of `A..B`: A, then those since it up to B by their first parents; B is HEAD by default.

        Raises `UsageError` outside a repository, for an unknown commit, and where A is no ancestor of B.
        """
        first, dots, last = commits.partition("..")
        if not dots or not first or last.startswith("."):
            raise UsageError(f"--commits takes a range of two commits, such as v1.2..HEAD; found {commits!r}")
        repository = repository_of(split_member(target.target)[0])
        ends = repository.commit(first), repository.commit(last or "HEAD")
        if repository.output("merge-base", *ends) != ends[0] or ends[0] == ends[1]:
            raise UsageError(f"--commits takes a commit and a later one that descends from it; found {commits!r}")
        log = repository.output("log", "--first-parent", "--reverse", "--format=%H %s", f"{ends[0]}..{ends[1]}")
        lines = [repository.output("log", "-1", "--format=%H %s", ends[0]), *log.splitlines()]
        known = tuple(Version(full, full[:10], title) for full, _, title in (line.partition(" ") for line in lines))
        head = head_of(repository, target.target)
        return cls(target, known, "commit", repository=str(repository.root), git=repository, head=head)

    def identity(self, number: int) -> Mapping[str, Any]:
        """The commit."""
        return {"commit": self.known[number].key}

    @contextmanager
    def placed(self, number: int) -> Iterator[Checkout]:
        """A worktree, which is removed in any case."""
        with worktree(self.git, self.known[number].key) as root:
            yield base_of(self.git, root, self.head)

    def sources(self, number: int) -> Sources:
        """Of the commit."""
        return Sources.of(self.git.files(self.known[number].key))

    def changed(self, number: int) -> frozenset[str]:
        """Of the two commits."""
        ends = self.known[0].key, self.known[number].key
        return frozenset(self.git.output("diff", "--name-only", "--no-relative", "--no-renames", *ends).splitlines())
