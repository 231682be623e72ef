"""A `Run` put in the order in which people read it; every renderer starts from here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ampcheck.core.run import SEVERITY, Chart, Coverage, Finding, Run, Scalar, Table, Verdict


@dataclass(frozen=True, slots=True)
class CheckSection:
    """What one check said, worst first, and its evidence."""

    check: str
    findings: tuple[Finding, ...]
    counts: Mapping[Verdict, int]
    tables: tuple[Table, ...]
    charts: tuple[Chart, ...]

    @property
    def worst(self) -> Verdict | None:
        """The gravest verdict, or None for evidence without a verdict."""
        return next(iter(self.counts), None)

    @property
    def passes(self) -> tuple[Finding, ...]:
        """The findings that passed."""
        return tuple(finding for finding in self.findings if finding.verdict is Verdict.PASS)

    @property
    def others(self) -> tuple[Finding, ...]:
        """The findings that did not pass, worst first."""
        return tuple(finding for finding in self.findings if finding.verdict is not Verdict.PASS)

    def worst_of(self, subject: str) -> tuple[int, Verdict]:
        """How many findings about `subject` have its gravest verdict, and which; (0, skip) where there is none."""
        counts = _counts(finding for finding in self.findings if finding.subject == subject)
        return next(((count, verdict) for verdict, count in counts.items()), (0, Verdict.SKIP))


@dataclass(frozen=True, slots=True)
class Sections:
    """A run in reading order: the verdict, what is wrong, what was not judged, every check, the evidence at large.

    `verdict` colours the headline. It is `pass` only where something passed, nothing else wants attention and the
    coverage is not empty; a run that judged nothing is a `skip`.
    """

    title: str
    headline: str
    verdict: Verdict
    counts: Mapping[Verdict, int]
    subjects: tuple[str, ...]
    problems: tuple[Finding, ...]
    unjudged: tuple[Finding, ...]
    checks: tuple[CheckSection, ...]
    tables: tuple[Table, ...]
    charts: tuple[Chart, ...]
    coverage: Coverage
    environment: Mapping[str, Scalar]


def arrange(run: Run) -> Sections:
    """`run` in reading order. Tables and charts stand with the check they name; those that name none come last."""
    evidence: tuple[Table | Chart, ...] = (*run.tables, *run.charts)
    named = [*(finding.check for finding in run.findings), *(item.check for item in evidence if item.check)]
    checks = [_check_section(run, slug) for slug in dict.fromkeys(named)]
    return Sections(
        title=run.title,
        headline=headline(run),
        verdict=_verdict(run),
        counts=run.counts(),
        subjects=tuple(dict.fromkeys(finding.subject for finding in run.findings)),
        problems=run.of(Verdict.FAIL) + run.of(Verdict.WARN),
        unjudged=run.of(Verdict.UNDECIDED) + run.of(Verdict.INCOMPLETE) + run.of(Verdict.SKIP),
        checks=tuple(sorted(checks, key=_gravity)),
        tables=tuple(table for table in run.tables if not table.check),
        charts=tuple(chart for chart in run.charts if not chart.check),
        coverage=run.coverage,
        environment=run.environment,
    )


def headline(run: Run) -> str:
    """The verdict in one line, such as `2 failed, 1 warning, 14 passed`; it never makes an empty run look well."""
    if not run.findings:
        return f"no verdict: {run.coverage} seen, no check made" if run.coverage.total else "nothing was looked at"
    counts = run.counts()
    text = ", ".join(f"{count:,} {_participle(verdict, count)}" for verdict, count in counts.items())
    if counts.keys() == {Verdict.SKIP}:
        text += ": nothing was judged"
    return text if run.coverage.total else f"{text}; coverage: nothing was looked at"


def _participle(verdict: Verdict, count: int) -> str:
    words = {Verdict.FAIL: "failed", Verdict.SKIP: "skipped", Verdict.PASS: "passed"}
    plural = {Verdict.WARN: "warning" if count == 1 else "warnings"}
    return words.get(verdict) or plural.get(verdict) or str(verdict)


def _verdict(run: Run) -> Verdict:
    counts = run.counts()
    for verdict in (Verdict.FAIL, Verdict.WARN, Verdict.UNDECIDED, Verdict.INCOMPLETE):
        if verdict in counts:
            return verdict
    return Verdict.PASS if Verdict.PASS in counts and run.coverage.total else Verdict.SKIP


def _check_section(run: Run, slug: str) -> CheckSection:
    found = [finding for finding in run.findings if finding.check == slug]
    return CheckSection(
        check=slug,
        findings=tuple(sorted(found, key=lambda finding: SEVERITY.index(finding.verdict))),
        counts=_counts(found),
        tables=tuple(table for table in run.tables if table.check == slug),
        charts=tuple(chart for chart in run.charts if chart.check == slug),
    )


def _counts(findings: Iterable[Finding]) -> dict[Verdict, int]:
    count = Counter(finding.verdict for finding in findings)
    return {verdict: count[verdict] for verdict in SEVERITY if count[verdict]}


def _gravity(section: CheckSection) -> int:
    return len(SEVERITY) if section.worst is None else SEVERITY.index(section.worst)


def short_names(subjects: Sequence[str]) -> dict[str, str]:
    """Subjects without what all of them begin with up to a bracket: `demo [float16, eager]` is `float16, eager`."""
    heads = {subject.partition(" [")[0] for subject in subjects}
    if len(heads) != 1 or not all(subject.endswith("]") and " [" in subject for subject in subjects):
        return {subject: subject for subject in subjects}
    return {subject: subject.partition(" [")[2].removesuffix("]") for subject in subjects}
