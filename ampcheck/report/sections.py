"""A `Run` in the order in which people read it; every renderer starts from here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ampcheck.core.run import (
    SEVERITY,
    Cause,
    Chart,
    Coverage,
    Finding,
    Run,
    Scalar,
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
    """The findings of one check, worst first, and its evidence."""

    check: str
    findings: tuple[Finding, ...]
    tables: tuple[Table, ...]
    charts: tuple[Chart, ...]

    @property
    def counts(self) -> Mapping[Verdict, int]:
        """How many findings have each verdict, worst first."""
        return count_verdicts(self.findings)

    @property
    def worst(self) -> Verdict | None:
        """The worst verdict; None for evidence without a verdict."""
        return min([finding.verdict for finding in self.findings], key=SEVERITY.index, default=None)

    @property
    def passes(self) -> tuple[Finding, ...]:
        """The findings that passed."""
        return tuple(finding for finding in self.findings if finding.verdict is Verdict.PASS)

    @property
    def others(self) -> tuple[Finding, ...]:
        """The findings that did not pass, worst first."""
        return tuple(finding for finding in self.findings if finding.verdict is not Verdict.PASS)

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

    `problems` are the causes, each once for all its arms; `twins` has the finding of each arm, and `following` what
    follows from them, by the position in `problems`.

    `judged` counts the subjects, each once in all its arms; `heads` are the arms by subject where there is one name,
    and else the subjects themselves.

    `verdict` colours the headline. It is `pass` only if something passed, nothing failed, warned or is undecided, and
    the coverage is not empty; a run that judged nothing is a `skip`.
    """

    title: str
    headline: str
    verdict: Verdict
    counts: Mapping[Verdict, int]
    subjects: tuple[str, ...]
    heads: Mapping[str, str]
    judged: int
    problems: tuple[Finding, ...]
    twins: tuple[tuple[Finding, ...], ...]
    following: tuple[tuple[Finding, ...], ...]
    unjudged: tuple[Finding, ...]
    checks: tuple[CheckSection, ...]
    topics: tuple[Topic, ...]
    coverage: Coverage
    environment: Mapping[str, Scalar]


def arrange(run: Run) -> Sections:
    """`run` in reading order. Tables and charts belong to the family of the check that they name."""
    evidence: tuple[Table | Chart, ...] = (*run.tables, *run.charts)
    named = (*run.findings, *(item for item in evidence if item.check))  # a damaged finding may have no name
    by_check: dict[str, list[Finding | Table | Chart]] = {item.check: [] for item in named}
    for item in named:
        by_check[item.check].append(item)
    checks = [_check_section(slug, items) for slug, items in by_check.items()]
    problems = causes(run.findings, nearest_first(run.of(Verdict.FAIL) + run.of(Verdict.WARN)))
    return Sections(
        title=run.title,
        headline=headline(run),
        verdict=_verdict(run),
        counts=run.counts(),
        subjects=tuple(dict.fromkeys([finding.subject for finding in run.findings])),
        heads=_heads(run.findings, problems),
        judged=len({finding.name for finding in run.findings}),
        problems=tuple(cause.finding for cause in problems),
        twins=tuple(cause.twins for cause in problems),
        following=tuple(cause.following for cause in problems),
        unjudged=tuple(finding for verdict in _UNJUDGED for finding in run.of(verdict)),
        checks=tuple(sorted(checks, key=lambda section: [*SEVERITY, None].index(section.worst))),
        topics=_topics(run),
        coverage=run.coverage,
        environment=run.environment,
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


def _check_section(slug: str, items: Sequence[Finding | Table | Chart]) -> CheckSection:
    findings: list[Finding] = []
    tables: list[Table] = []
    charts: list[Chart] = []
    for item in items:
        if isinstance(item, Finding):
            findings.append(item)
        elif isinstance(item, Table):
            tables.append(item)
        else:
            charts.append(item)
    findings.sort(key=lambda finding: SEVERITY.index(finding.verdict))
    return CheckSection(check=slug, findings=tuple(findings), tables=tuple(tables), charts=tuple(charts))


def _heads(findings: Sequence[Finding], problems: Iterable[Cause]) -> dict[str, str]:
    """What tells subjects apart: their arms, such as `float16, eager`, unless they differ in their names."""
    heads = {finding.subject: str(finding.arm) for finding in findings}
    heads |= {cause.finding.subject: cause.arms for cause in problems}
    alone = len({finding.name for finding in findings}) == 1 and all(heads.values())
    return heads if alone else {subject: subject for subject in heads}
