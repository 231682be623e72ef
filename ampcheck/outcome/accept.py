"""Acceptance of findings by a repository: severities of checks, comments on source lines, and its baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from fnmatch import fnmatchcase

from ampcheck.checks import REGISTRY
from ampcheck.checks import findings as findings_of
from ampcheck.core.errors import UsageError
from ampcheck.core.run import PROBLEMS, SEVERITY, Finding, Run, Verdict, causes_by_key
from ampcheck.core.settings import Settings
from ampcheck.core.source import IN_SOURCE, with_excerpts
from ampcheck.core.text import did_you_mean
from ampcheck.outcome.baseline import Baseline
from ampcheck.outcome.comments import ignored_at
from ampcheck.records.baseline import BaselineStats


def accept(run: Run, settings: Settings, *, gone: bool = False, today: date | None = None, reads: bool = True) -> Run:
    """The run as the repository judges it: severities, then comments, then the baseline decide on each problem.

    What follows from an accepted finding is accepted with it; problems get the excerpts of their sources. gone: also
    warn of accepted findings that are gone. reads: sources may be read; not for a run from a file, which says itself
    what its comments accept.
    Raises `UsageError` for settings that name no check, and for a damaged baseline.
    """
    levels, selected = levels_and_selection(settings)
    findings = [
        finding
        for finding in (with_excerpts(run.findings) if reads else run.findings)
        if levels.get(finding.check) != "ignore" and (not settings.select or finding.check in selected)
    ]
    levelled = [_at_level(finding, levels.get(finding.check, "")) for finding in findings]
    findings = list(_without_milder_causes(findings, levelled))
    changed = [_at_level(finding, levels.get(finding.check, "")) for finding in findings]
    changed = list(map(_commented, changed)) if reads else changed
    baseline = Baseline.load(settings.folder / settings.baseline)
    changed = list(baseline.accept(changed, today or date.today()))
    judged = tuple(with_accepted_causes(findings, changed))
    if gone:
        left = tuple((entry.check, entry.subject) for entry in baseline.gone(judged))
        judged = (*judged, *findings_of(BaselineStats(settings.baseline, left), settings.limits))
    return run if list(map(id, judged)) == list(map(id, run.findings)) else replace(run, findings=judged)


def levels_and_selection(settings: Settings) -> tuple[dict[str, str], set[str]]:
    """The severity of each check that has one, and the checks that are selected. Raises `UsageError` for settings that
    name no check."""
    levels = {
        slug: level
        for pattern, level in settings.severity.items()
        for slug in _matching(pattern, "ignore" if level == "ignore" else "severity")
    }
    if levels.get("coverage") == "ignore":
        raise UsageError("coverage cannot be ignored: a run without it says nothing about what was judged")
    return levels, {slug for pattern in settings.select for slug in _matching(pattern, "select")} | {"coverage"}


def selected_groups(settings: Settings, *, each: bool) -> list[list[str]]:
    """The selected checks of which each group must have a verdict. each: those of each pattern, as a command line asks
    for them; else all together, as a repository names what it wants to hear of in any of its subjects."""
    groups = [_matching(pattern, "select") for pattern in settings.select]
    return groups if each or not groups else [[slug for group in groups for slug in group]]


def _matching(pattern: str, key: str) -> list[str]:
    """The checks that a glob pattern matches."""
    if slugs := [slug for slug in REGISTRY if fnmatchcase(slug, pattern)]:
        return slugs
    meant = did_you_mean(pattern, REGISTRY) or "`ampcheck explain` lists them"
    raise UsageError(f"{key} names {pattern!r:.60}, which is no check: {meant}")


def _at_level(finding: Finding, level: str) -> Finding:
    if level == "fail" and finding.verdict is Verdict.WARN:
        return replace(finding, verdict=Verdict.FAIL)
    if level == "warn" and finding.verdict is Verdict.FAIL:
        return replace(finding, verdict=Verdict.WARN)
    return finding


def _without_milder_causes(findings: Sequence[Finding], levelled: Sequence[Finding]) -> Iterator[Finding]:
    """The findings; one whose severity is now above that of its cause is a cause of its own."""
    causes = causes_by_key(findings, levelled)
    for finding, own in zip(findings, levelled, strict=True):
        cause = causes.get(finding.cause)
        milder = cause is not None and SEVERITY.index(cause.verdict) > SEVERITY.index(own.verdict)
        yield replace(finding, cause=()) if milder else finding


def _commented(finding: Finding) -> Finding:
    if finding.verdict not in PROBLEMS or not (ignored := ignored_at(finding.where)):
        return finding
    for pattern, reason in ignored.items():
        if fnmatchcase(finding.check, pattern):
            accepted = f"{IN_SOURCE}{finding.where.file}:{finding.where.line}: {reason or 'no reason is given'}"
            return replace(finding, verdict=Verdict.ACCEPTED, accepted=accepted)
    if unknown := [pattern for pattern in ignored if not any(fnmatchcase(slug, pattern) for slug in REGISTRY)]:
        return replace(
            finding, hint=f"{finding.hint} (The comment here names {unknown[0]}, which is no check.)".strip()
        )
    return finding


def with_accepted_causes(before: Sequence[Finding], after: Sequence[Finding]) -> Iterator[Finding]:
    """The findings `after` with causes among themselves; what follows from an accepted finding is accepted with it."""
    causes = causes_by_key(before, after)
    for finding in after:
        cause = causes.get(finding.cause)
        if not finding.cause or cause is None:  # a cause that is ignored explains nothing
            yield replace(finding, cause=()) if finding.cause else finding
        elif cause.verdict is Verdict.ACCEPTED and finding.verdict in PROBLEMS:
            accepted = f"it follows from {cause.check}, accepted {cause.accepted}"
            yield replace(finding, verdict=Verdict.ACCEPTED, accepted=accepted, cause=cause.key)
        else:
            yield finding if finding.cause == cause.key else replace(finding, cause=cause.key)
