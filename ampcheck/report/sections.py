"""A `Run` in the order in which people read it; every renderer starts from here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ampcheck.core.run import (
    SEVERITY,
    Cause,
    Chart,
    Finding,
    Run,
    Table,
    Verdict,
    causes,
    count_verdicts,
    nearest_first,
)

_UNJUDGED = (Verdict.UNDECIDED, Verdict.INCOMPLETE, Verdict.ACCEPTED, Verdict.SKIP)
_QUIET = (Verdict.ACCEPTED, Verdict.SKIP, Verdict.PASS)
"""Verdicts that leave a run green."""


@dataclass(frozen=True, slots=True)
class CheckSection:
    """The findings of one check, worst first; none for evidence without a verdict."""

    check: str
    findings: tuple[Finding, ...]

    @property
    def counts(self) -> Mapping[Verdict, int]:
        """Number of findings by verdict, worst first."""
        return count_verdicts(self.findings)

    @property
    def worst(self) -> Verdict | None:
        """The worst verdict; None for evidence without a verdict."""
        return min([finding.verdict for finding in self.findings], key=SEVERITY.index, default=None)

    @property
    def passes(self) -> tuple[Finding, ...]:
        """The findings that passed."""
        return tuple(finding for finding in self.findings if finding.verdict is Verdict.PASS)

    def worst_of(self, subject: str) -> tuple[int, Verdict]:
        """The number of findings about `subject` with its worst verdict, and that verdict; (0, skip) without any."""
        counts = count_verdicts(finding for finding in self.findings if finding.subject == subject)
        return next(((count, verdict) for verdict, count in counts.items()), (0, Verdict.SKIP))


@dataclass(frozen=True, slots=True)
class Topic:
    """The evidence of a family of checks (training, speed); the last topic, without a name, belongs to none."""

    name: str
    tables: tuple[Table, ...]
    charts: tuple[Chart, ...]


@dataclass(frozen=True, slots=True)
class Sections:
    """A run in reading order: the verdict, failures and warnings, unjudged checks, every check, evidence by topic.

    causes: of failures and warnings, each once for all its arms. heads: the arms by subject where there is one name,
    and else the subjects themselves. judged: the number of subjects, each once in all its arms.

    `verdict` colours the headline. It is `pass` only if something passed, nothing failed, warned or is undecided, and
    the coverage is not empty; a run that judged nothing is a `skip`.
    """

    run: Run
    headline: str
    verdict: Verdict
    causes: tuple[Cause, ...]
    heads: Mapping[str, str]
    judged: int
    unjudged: tuple[Finding, ...]
    checks: tuple[CheckSection, ...]
    topics: tuple[Topic, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """A finding for each of the causes."""
        return tuple(cause.finding for cause in self.causes)

    @property
    def subjects(self) -> tuple[str, ...]:
        """The subjects in all their arms."""
        return tuple(dict.fromkeys(finding.subject for finding in self.run.findings))


def arrange(run: Run) -> Sections:
    """`run` in reading order. Tables and charts belong to the family of the check that they name."""
    evidence: tuple[Table | Chart, ...] = (*run.tables, *run.charts)
    slugs = [finding.check for finding in run.findings] + [item.check for item in evidence if item.check]
    worst_first = sorted(run.findings, key=lambda finding: SEVERITY.index(finding.verdict))
    checks = [CheckSection(slug, tuple(f for f in worst_first if f.check == slug)) for slug in dict.fromkeys(slugs)]
    problems = causes(run.findings, nearest_first(run.of(Verdict.FAIL) + run.of(Verdict.WARN)))
    return Sections(
        run,
        headline(run),
        _verdict(run),
        tuple(problems),
        _heads(run.findings, problems),
        judged=len({finding.name for finding in run.findings}),
        unjudged=tuple(finding for verdict in _UNJUDGED for finding in run.of(verdict)),
        checks=tuple(sorted(checks, key=lambda section: [*SEVERITY, None].index(section.worst))),
        topics=_topics(run),
    )


def _topics(run: Run) -> tuple[Topic, ...]:
    families = {finding.check: finding.family or finding.check for finding in run.findings}
    evidence: tuple[Table | Chart, ...] = (*run.charts, *run.tables)
    names = dict.fromkeys(families.get(item.check, item.check) for item in evidence)

    def of(name: str) -> Topic:
        tables = (table for table in run.tables if families.get(table.check, table.check) == name)
        charts = (chart for chart in run.charts if families.get(chart.check, chart.check) == name)
        return Topic(name, tuple(tables), tuple(charts))

    return tuple(of(name) for name in sorted(names, key=lambda name: not name))


def headline(run: Run) -> str:
    """The verdict in one line, such as `2 failed, 1 warning, 14 passed`; an empty run has none."""
    if not run.findings:
        return f"no verdict: {run.coverage} seen, no check made" if run.coverage.total else "nothing was looked at"
    counts = run.counts()
    text = ", ".join(f"{count:,} {_participle(verdict, count)}" for verdict, count in counts.items())
    if counts.keys() == {Verdict.SKIP}:
        text += ": nothing was judged"
    device, _, emulated = str(run.environment.get("autocast policy", "")).partition(", ")
    if emulated:
        text += f"; {device.upper()}'s policy, emulated on this CPU"
    return text if run.coverage.total else f"{text}; coverage: nothing was looked at"


def _participle(verdict: Verdict, count: int) -> str:
    if verdict is Verdict.WARN:
        return "warning" if count == 1 else "warnings"
    return {Verdict.FAIL: "failed", Verdict.SKIP: "skipped", Verdict.PASS: "passed"}.get(verdict, str(verdict))


def _verdict(run: Run) -> Verdict:
    worst = next(iter(run.counts()), Verdict.SKIP)
    passed = bool(run.of(Verdict.PASS)) and run.coverage.total
    return worst if worst not in _QUIET else Verdict.PASS if passed else Verdict.SKIP


def _heads(findings: Sequence[Finding], problems: Iterable[Cause]) -> dict[str, str]:
    """Return the part of a name by which subjects differ: their arms, such as `float16, eager`, or else their names."""
    heads = {finding.subject: str(finding.arm) for finding in findings}
    heads |= {cause.finding.subject: cause.arms for cause in problems}
    alone = len({finding.name for finding in findings}) == 1 and all(heads.values())
    return heads if alone else {subject: subject for subject in heads}
