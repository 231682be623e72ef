"""`# ampcheck: ignore[overflow] reason`: a comment in a statement, or above it, that accepts findings about it."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.source import lines_of

_COMMENT = re.compile(r"#\s*ampcheck:\s*ignore\[(?P<checks>[^\]]*)\]\s*(?P<reason>[^#]*)")


def commented(finding: Finding) -> Finding:
    """The finding, accepted where a comment at its place names its check."""
    reason = ignored_at(finding.where).get(finding.check)
    if reason is None:
        return finding
    return replace(finding, verdict=Verdict.ACCEPTED, accepted=reason or "a comment on the line")


def ignored_at(where: Where) -> Mapping[str, str]:
    """The checks that comments on the statement at `where` ignore, each with its reason, empty where none is given."""
    if not where.file or where.line is None:
        return {}
    return _comments(where.file, "".join(lines_of(where.file))).get(where.line, {})


@lru_cache(maxsize=64)
def _comments(_file: str, source: str) -> Mapping[int, Mapping[str, str]]:
    """The ignored checks of each line: those of the comments in its statement, of which a finding may name any line,
    and directly above it."""
    found: dict[int, dict[str, str]] = {}
    if "ampcheck:" not in source:
        return found
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):  # a template, or a file that changed
        return found
    first, ignored = 0, dict[str, str]()
    for token in tokens:
        first = first or token.start[0]
        if token.type == tokenize.COMMENT and (match := _COMMENT.match(token.string)):
            names = (name.strip() for name in match["checks"].split(","))
            ignored.update((name, match["reason"].strip()) for name in names if name)
        if token.type == tokenize.NEWLINE:
            found.update((line, ignored) for line in range(first, token.start[0] + 1) if ignored)
            first, ignored = 0, {}
    return found
