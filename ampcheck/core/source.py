"""Source files as findings name them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from linecache import checkcache, getlines

from ampcheck.core.excerpt import excerpt_of
from ampcheck.core.run import Finding, Verdict, Where

_PROBLEMS = (Verdict.FAIL, Verdict.WARN)


def lines_of(file: str) -> list[str]:
    """The lines of a source file as it is now; none where it cannot be read."""
    checkcache(file)
    return getlines(file)


def code_at(where: Where) -> str:
    """The source line at a location, without indentation; empty where it is not known."""
    lines = lines_of(where.file) if where.file and where.line is not None else []
    return lines[where.line - 1].strip() if where.line is not None and 0 < where.line <= len(lines) else ""


def with_excerpts(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings; failures and warnings with the excerpt of the source at their location, where it can be read."""
    return tuple(_with_excerpt(finding) if finding.verdict in _PROBLEMS else finding for finding in findings)


def _with_excerpt(finding: Finding) -> Finding:
    where = finding.where
    if finding.excerpt.lines or not where.file or where.line is None:
        return finding
    excerpt = excerpt_of(lines_of(where.file), where.line, where.op, where.module)
    return replace(finding, excerpt=excerpt) if excerpt.lines else finding
