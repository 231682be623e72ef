"""A rule: what it requires, which files it reads, and its reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from ampcheck.core.check import Check
from ampcheck.lint.source import Source


@dataclass(frozen=True, slots=True)
class Edit:
    """A replacement of source, by lines from 1 and columns from 0 in characters."""

    line: int
    column: int
    end_line: int
    end_column: int
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """A mistake at a line. message: what is required and what was found. fix: edits that mend it; empty for none."""

    line: int
    message: str
    fix: tuple[Edit, ...] = ()


Reader: TypeAlias = Callable[[Source], Iterator[Report]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule is one file, as a check is.

    check: its code and its page. needles: a file is parsed where it contains one text of each of these, and matches all
    `patterns`: parsing takes most of the time. read: the reports. fails: whether a report fails; others are warnings.
    audit: the command that proves a report.
    """

    check: Check
    needles: tuple[tuple[str, ...], ...]
    read: Reader
    fails: bool = True
    audit: str = ""
    patterns: tuple[str, ...] = ()
