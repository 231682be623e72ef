"""A target in each version: judged in a process of its own, once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ampcheck import SpeedOptions
from ampcheck.checks.speed import WHERE
from ampcheck.checks.speed.regression import CHECK as REGRESSION
from ampcheck.core.errors import UsageError
from ampcheck.core.git import Side
from ampcheck.core.run import PROBLEMS, Run, Table, Verdict
from ampcheck.core.settings import Target
from ampcheck.core.worker import Worker
from ampcheck.records.speed import BASE, HEAD, Rule
from ampcheck.speed.base.checkout import describe_strays
from ampcheck.speed.base.judge import base_run, check_base
from ampcheck.speed.base.measure import compare
from ampcheck.speed.base.stats import BaseStats
from ampcheck.tools.bisect.versions import Versions
from ampcheck.tools.sweep.results import AUDIT, JUDGED, REFUSED, Allowance, Result, ResultFolder, Task
from ampcheck.tools.sweep.sweep import judge, unjudged

SPEED = "speed"
"""The command of a task that compares the first version with another."""

UNDECIDED = "undecided"
"""Ending of a comparison of speed that is tried once more, and again by the next search."""

_OPS = "Overloads under autocast"

_LIMIT, _FLOOR = 3 / 8, 5 / 8
"""Shares of the logarithm of the whole change: a version with less than the first passes, with more than both fails."""


@dataclass(slots=True)
class History:
    """The versions of a range, the oldest first, with the results of those that were judged.

    speed: compare the speed of each with that of the first by these options; None: audit each.
    """

    versions: Versions
    folder: ResultFolder
    allowance: Allowance
    speed: SpeedOptions | None = None
    results: dict[int, Result] = field(default_factory=dict)

    @property
    def looks(self) -> int:
        """Upper bound of the number of versions that a search judges, if each has a verdict."""
        return 2 + (len(self.versions.known) - 2).bit_length()

    def result(self, number: int) -> Result:
        """The result of a version: of this search, of an earlier one that judged it, or of a run now."""
        if number not in self.results:
            task = self._task(number)
            known = self.folder.load(task)
            if known is None:
                known = self._run(task, number)
                self.folder.save(task, known)
                if self.speed is None or number:
                    self.versions.done(number)
            self.results[number] = known
        return self.results[number]

    def verdicts(self, number: int) -> Mapping[str, Verdict]:
        """The verdict of each check about a version that was judged; checks without a decided one are left out."""
        result = self.result(number)
        if result.ended != JUDGED:
            return {}
        found: dict[str, set[Verdict]] = {}
        for finding in result.run.findings:
            found.setdefault(finding.check, set()).add(finding.verdict)
        return {check: verdict for check, known in found.items() if (verdict := decided(known)) is not None}

    def forget_undecided(self, numbers: Iterable[int]) -> bool:
        """Let the undecided comparisons of speed of some versions be made once more; whether there are any."""
        undecided = [number for number in numbers if self.results[number].ended == UNDECIDED]
        for number in undecided:
            del self.results[number]
        return bool(undecided)

    def called(self, number: int) -> frozenset[str]:
        """The overloads that the target sends through autocast in a version; empty where that was not recorded."""
        tables = (table for table in self.result(number).run.tables if table.title == _OPS)
        return frozenset(str(op) for table in tables for (op,) in table.rows)

    def speed_rule(self, number: int) -> Rule:
        """The requirement on the speed of a version, as a multiple of that of the first.

        The last must be no slower than the first. Where it is, a version between them is compared with half the change:
        a question of a larger difference than `effect`, which the same launches answer on a noisier machine. Each
        comparison may be made once more.
        """
        assert self.speed is not None
        rule, last = self.speed.rule(comparisons=2 * (self.looks - 1)), len(self.versions.known) - 1
        ratio = _slower(self.result(last).run) if 0 < number < last else None
        return rule if ratio is None else replace(rule, limit=ratio**_LIMIT, effect=ratio ** (_LIMIT - _FLOOR) - 1)

    def _task(self, number: int) -> Task:
        identity = dict(self.versions.identity(number))
        if self.speed is None:
            return Task(AUDIT, self.versions.target, **identity)
        rule = self.speed_rule(number)
        options = {"mode": self.speed.mode, "budget": self.speed.budget, "effect": rule.effect, "limit": rule.limit}
        settings = (*identity.pop("settings", ()), ("first", self.versions.known[0].key), *options.items())
        return Task(SPEED, self.versions.target, settings=settings, **identity)

    def _run(self, task: Task, number: int) -> Result:
        name, begin = f"{self.versions.target.target} in {self.versions.known[number].name}", time.perf_counter()
        peak = None
        try:
            run, ended, reason, peak = self._audited(task, number, name) if self.speed is None else self._timed(number)
        except UsageError as error:  # of this version: the search goes on with others
            run, ended, reason = unjudged(name, task.command, REFUSED, str(error))
        seconds = round(time.perf_counter() - begin, 1)
        return Result(task.command, self.versions.target.target, run, ended, reason, seconds, peak)

    def _audited(self, task: Task, number: int, name: str) -> tuple[Run, str, str, int | None]:
        """The run of a version, how it ended, why there is no other run, and the peak of memory in bytes."""
        with (
            TemporaryDirectory(prefix="ampcheck-", ignore_cleanup_errors=True) as scratch,
            self.versions.placed(number) as checkout,
            checkout.worker("ampcheck.tools.bisect.child_process", name, self.allowance.memory) as worker,
        ):
            placed = replace(task, target=replace(self.versions.target, target=checkout.target))
            places = {"scratch": scratch, "root": str(checkout.root), "repository": self.versions.repository}
            run, ended, reason = judge(worker, name, placed, self.allowance, **places)
            if ended == JUDGED:
                self._require_own(worker, number, checkout.root)
                run = self._with_ops(run, worker, placed.target)
            peak = worker.peak
            worker.kill()
        return run, ended, reason, peak

    def _require_own(self, worker: Worker, number: int, root: Path) -> None:
        """Raise `UsageError` where an installed copy of the repository's code was judged, the same in all versions."""
        if (sources := self.versions.sources(number)).tails:
            loaded = worker.ask("modules", root=str(root), names=sources.names)
            if strays := sources.strays(loaded, root, self.versions.changed(len(self.versions.known) - 1)):
                raise UsageError(describe_strays(strays, loaded))

    def _with_ops(self, run: Run, worker: Worker, target: Target) -> Run:
        """The run with the overloads that a model sends through autocast; what trains is not run once more for it."""
        if not self.versions.changes_policy or not run.coverage.seen.get("ops under autocast"):
            return run
        with suppress(UsageError):  # a clause of the finding depends on it, and no verdict
            ops = worker.ask("ops", timeout=self.allowance.seconds, target=asdict(target))
            return replace(run, tables=(*run.tables, Table(_OPS, ("overload",), [(op,) for op in ops])))
        return run

    def _timed(self, number: int) -> tuple[Run, str, str, None]:
        """The same of a comparison of the first version, the base, with another, the head."""
        assert self.speed is not None
        versions, name = self.versions, self.versions.target.target
        if not number:
            text = f"the others are compared with {versions.known[0]}"
            return Run(findings=(REGRESSION.passed(name, text, 1, where=WHERE),)), JUDGED, "", None
        rule = self.speed_rule(number)
        base_side, head_side = (Side("", each.name, each.title) for each in (versions.known[0], versions.known[number]))
        with versions.placed(0) as base, versions.placed(number) as head:
            settings = {
                "device": self.versions.target.device,
                "mode": self.speed.mode,
                "precision": self.speed.precision,
            }
            stats = compare(
                BaseStats(name, base_side, head_side, settings=name),
                {BASE: base, HEAD: head},
                self.speed,
                {**settings, "repository": versions.repository},
                sources={BASE: versions.sources(0), HEAD: versions.sources(number)},
                changed=versions.changed(number),
                rule=rule,
            )
        run = base_run(stats, check_base(stats, rule), rule)
        findings = run.by(REGRESSION.slug)
        if decided({finding.verdict for finding in findings}) is None:
            return run, UNDECIDED, findings[0].message, None
        return run, JUDGED, "", None


def _slower(run: Run) -> float | None:
    """Return how many times as fast as the first version a slower one is; None where it is not shown to be slower."""
    times = run.by(REGRESSION.slug)  # graph breaks may fail as well
    return next((finding.observed for finding in times if finding.verdict is Verdict.FAIL), None)


def decided(verdicts: set[Verdict]) -> Verdict | None:
    """The verdict of a check from those of its findings; None where it is undecided, incomplete, or only skipped."""
    for verdict in PROBLEMS:
        if verdict in verdicts:
            return verdict
    if verdicts & {Verdict.UNDECIDED, Verdict.INCOMPLETE}:
        return None
    return Verdict.PASS if Verdict.PASS in verdicts else None
