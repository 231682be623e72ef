"""A target as each commit of a range has it: audited in a worktree, in a process of its own, once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run, Verdict
from ampcheck.core.settings import Target
from ampcheck.core.subject import split_member
from ampcheck.core.worker import Worker
from ampcheck.speed.base.checkout import (
    Checkout,
    Sources,
    base_of,
    describe_strays,
    head_of,
    repository_of,
    worktree,
)
from ampcheck.speed.git import Repository
from ampcheck.sweep.results import AUDIT, JUDGED, REFUSED, Limits, Result, ResultFolder, Task
from ampcheck.sweep.sweep import judge, unjudged


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit of the range. name: abbreviated; title: the first line of its message."""

    full: str
    title: str

    @property
    def name(self) -> str:
        """Its abbreviated name."""
        return self.full[:10]

    def __str__(self) -> str:
        return f"{self.name} ({self.title})"


@dataclass(slots=True)
class History:
    """The commits of a range, the oldest first, with the results of those that were audited."""

    target: Target
    repository: Repository
    head: Checkout
    commits: tuple[Commit, ...]
    folder: ResultFolder
    limits: Limits
    changed: frozenset[str]
    results: dict[int, Result] = field(default_factory=dict)

    @classmethod
    def of(cls, target: Target, commits: str, folder: ResultFolder, limits: Limits) -> History:
        """The history of `A..B`: A, then the commits since it up to B by their first parents; B is HEAD by default.

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
        known = tuple(Commit(full, title) for full, _, title in (line.partition(" ") for line in lines))
        changed = repository.output("diff", "--name-only", "--no-relative", "--no-renames", *ends).splitlines()
        return cls(target, repository, head_of(repository, target.target), known, folder, limits, frozenset(changed))

    def result(self, number: int) -> Result:
        """The result of a commit: of this search, of an earlier one that judged it, or of an audit now."""
        if number not in self.results:
            task = Task(AUDIT, self.target, self.commits[number].full)
            known = self.folder.load(task)
            if known is None:
                known = self._audited(task)
                self.folder.save(task, known)
            self.results[number] = known
        return self.results[number]

    def verdicts(self, number: int) -> Mapping[str, Verdict]:
        """The verdict of each check about a commit that was judged; checks without a decided one are left out."""
        result = self.result(number)
        if result.ended != JUDGED:
            return {}
        found: dict[str, set[Verdict]] = {}
        for finding in result.run.findings:
            found.setdefault(finding.check, set()).add(finding.verdict)
        return {check: verdict for check, known in found.items() if (verdict := decided(known)) is not None}

    def _audited(self, task: Task) -> Result:
        name, begin = f"{self.target.target} in {task.commit[:10]}", time.perf_counter()
        peak = None
        try:
            run, ended, reason, peak = self._judged(task, name)
        except UsageError as error:  # of this commit: the search goes on with others
            run, ended, reason = unjudged(name, AUDIT, REFUSED, str(error))
        seconds = round(time.perf_counter() - begin, 1)
        return Result(AUDIT, self.target.target, run, ended, reason, seconds, peak)

    def _judged(self, task: Task, name: str) -> tuple[Run, str, str, int | None]:
        """The run of a commit, how it ended, why there is no other run, and the peak of memory in bytes."""
        with (
            TemporaryDirectory(prefix="ampcheck-", ignore_cleanup_errors=True) as scratch,
            worktree(self.repository, task.commit) as root,
        ):
            checkout = base_of(self.repository, root, self.head)
            with Worker(
                "ampcheck.bisect.child_process",
                name=name,
                cwd=checkout.folder,
                env={"PYTHONDONTWRITEBYTECODE": "1"},
                pythonpath=checkout.paths,
                memory=self.limits.memory,
            ) as worker:
                placed = replace(task, target=replace(self.target, target=checkout.target))
                places = {"scratch": scratch, "root": str(root), "repository": str(self.repository.root)}
                run, ended, reason = judge(worker, name, placed, self.limits, **places)
                if ended == JUDGED:
                    self._require_own_code(worker, task, str(root))
                peak = worker.peak
                worker.kill()
        return run, ended, reason, peak

    def _require_own_code(self, worker: Worker, task: Task, root: str) -> None:
        """Raise `UsageError` where an installed copy of the repository's code was judged, the same in all commits."""
        sources = Sources.of(self.repository.files(task.commit))
        loaded = worker.ask("modules", root=root, names=sources.names)
        if strays := sources.strays(loaded, Path(root), self.changed):
            raise UsageError(describe_strays(strays, loaded))


def decided(verdicts: set[Verdict]) -> Verdict | None:
    """The verdict of a check from those of its findings; None where it is undecided, incomplete, or only skipped."""
    for verdict in (Verdict.FAIL, Verdict.WARN):
        if verdict in verdicts:
            return verdict
    if verdicts & {Verdict.UNDECIDED, Verdict.INCOMPLETE}:
        return None
    return Verdict.PASS if Verdict.PASS in verdicts else None
