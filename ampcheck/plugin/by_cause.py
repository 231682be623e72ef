"""The findings of a watched suite: one for each cause, whatever the number of tests that meet it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace
from pathlib import Path

from ampcheck.core.run import PROBLEMS, SEVERITY, Finding, Verdict
from ampcheck.core.source import place_of, watched_as
from ampcheck.core.text import counted


def by_cause(findings: Iterable[Finding], root: Path) -> tuple[Finding, ...]:
    """The findings; those of watched tests that have one place as one, the worst, with the number of other tests.

    A pass counts the tests that passed the check. Others, of blocks and asserts in tests, stay as they are.
    """
    groups: dict[Hashable, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(_key(finding, root), []).append(finding)
    kept = {key: min(group, key=_worst_first) for key, group in groups.items()}
    causes = {finding.key: kept[key].key for key, group in groups.items() for finding in group}
    merged = []
    for key, group in groups.items():
        finding, tests = kept[key], len({member.subject for member in group})
        cause = causes.get(finding.cause, finding.cause)
        finding = replace(finding, cause=() if cause == finding.key else cause)
        if tests > 1:
            finding = replace(finding, message=f"in this and in {counted(tests - 1, 'more tests')}: {finding.message}")
        merged.append(finding)
    return tuple(merged)


def _worst_first(finding: Finding) -> tuple[int, bool]:
    return SEVERITY.index(finding.verdict), bool(finding.cause)


def _key(finding: Finding, root: Path) -> Hashable:
    """Equal for the findings that are one."""
    if not watched_as(finding.subject):
        return id(finding)
    if finding.verdict is Verdict.PASS:
        return finding.check
    verdict = "" if finding.verdict in (*PROBLEMS, Verdict.ACCEPTED) else finding.verdict
    hint = "" if finding.where.file else finding.hint
    return verdict, finding.where.line, hint, place_of(finding, root)
