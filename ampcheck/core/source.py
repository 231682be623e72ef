"""Source files as findings name them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from linecache import checkcache, getlines
from pathlib import Path
from typing import TypeAlias

from ampcheck.core.excerpt import excerpt_of, name_at
from ampcheck.core.run import PROBLEMS, Finding, Where

Place: TypeAlias = "tuple[str, str, str, str, str, str, str]"
"""A finding without numbers, wording and line number."""

IN_SOURCE = "by a comment at "
"""Beginning of `Finding.accepted` where a comment in the source accepts the finding."""

_COMMENT = re.compile(r"\s*#\s*ampcheck:.*")

_WATCHED = re.compile(r".*::.* (under \w+ autocast|with models in float16)\b.*", re.DOTALL)
"""The subject of a test that runs under `--ampcheck-watch`."""


def lines_of(file: str) -> list[str]:
    """The current lines of a source file; none where it cannot be read, or is a device or a pipe."""
    if os.path.exists(file) and not os.path.isfile(file):
        return []
    with suppress(ValueError):  # a NUL in the path
        checkcache(file)
        return getlines(file)
    return []


def code_at(where: Where) -> str:
    """The source line at a location, without indentation; empty where it is not known."""
    lines = lines_of(where.file) if where.file and where.line is not None else []
    return lines[where.line - 1].strip() if where.line is not None and 0 < where.line <= len(lines) else ""


def op_name(where: Where) -> str:
    """The op at a location as its source line calls it, or else its overload without the namespace of PyTorch's own."""
    written = name_at(lines_of(where.file), where.line, where.op) if where.file and where.line is not None else ""
    return written or where.op.removeprefix("aten::")


def watched_as(subject: str) -> str:
    """Return how a test under `--ampcheck-watch` runs, such as `under float16 autocast`; empty for another subject."""
    watched = _WATCHED.fullmatch(subject)
    return watched[1] if watched else ""


def place_of(finding: Finding, folder: Path) -> Place:
    """The check, subject, phase, module, op, file and source line of a finding; the file as `path_in` gives it, the
    line without a comment to ampcheck, which may be added to it. A line that a watched suite runs is one place for all
    of its tests."""
    where, subject = finding.where, finding.subject
    module = where.module
    code = _COMMENT.sub("", finding.code)
    if way := watched_as(subject):
        subject, module = f"tests {way}", "" if where.file else module
    return finding.check, subject, where.phase, module, where.op, path_in(folder, where.file), code


def fingerprint_of(finding: Finding, folder: Path) -> str:
    """The place of a finding in 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(place_of(finding, folder)).encode()).hexdigest()[:32]


def path_in(folder: Path, file: str) -> str:
    """A file that exists, relative to `folder` and with `/`; any other path unchanged."""
    if not os.path.exists(file):
        return file
    with suppress(ValueError):  # another drive of Windows
        return os.path.relpath(file, folder).replace(os.sep, "/")
    return file


def repository_of(folder: Path) -> Path:
    """The nearest folder at or above `folder` that a git repository has as its root; `folder` itself outside of one."""
    folder = folder.resolve()
    return next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), folder)


def with_excerpts(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings; failures and warnings with the line and the excerpt of the source at their location, where it can
    be read. Nothing else reads it: a run that is read from a file may name any file of this machine."""
    return tuple([_with_excerpt(finding) if finding.verdict in PROBLEMS else finding for finding in findings])


def _with_excerpt(finding: Finding) -> Finding:
    where = finding.where
    if finding.excerpt.lines or not where.file or where.line is None:
        return finding
    excerpt = excerpt_of(lines_of(where.file), where.line, where.op, where.module)
    return replace(finding, excerpt=excerpt, code=finding.code or code_at(where)) if excerpt.lines else finding
