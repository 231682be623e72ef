"""Reads files of Python and reports mistakes of mixed precision and compilation that are visible without running."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from ampcheck.core.environment import quiet
from ampcheck.core.errors import UsageError
from ampcheck.core.files import cache_home, write_atomically
from ampcheck.core.run import Coverage, Finding, Run, Where
from ampcheck.core.text import did_you_mean
from ampcheck.lint import rules as _rules
from ampcheck.lint.rule import Edit, Report, Rule
from ampcheck.lint.source import Source, split_lines
from ampcheck.outcome.comments import commented, ignored_at

_SKIPPED = frozenset(("node_modules", "build", "dist", "__pycache__", "site-packages", "venv"))
"""Folders that are not entered, nor those whose names begin with a dot, unless they are asked for."""

UNREAD = "files that cannot be parsed"


@cache
def rules() -> dict[str, Rule]:
    """The rules by their codes."""
    modules = (import_module(f"{_rules.__name__}.{module.name}") for module in iter_modules(_rules.__path__))
    return {module.RULE.check.slug: module.RULE for module in modules}


def select_rules(select: Sequence[str]) -> list[Rule]:
    """The rules whose codes begin with, or match, one of `select`; all without any. Raises `UsageError` for none."""
    for pattern in select:
        if not any(_matches(code, pattern) for code in rules()):
            meant = did_you_mean(pattern, rules()) or f"there are {', '.join(rules())}"
            raise UsageError(f"--select names {pattern!r:.40}, which is no rule: {meant}")
    return [rule for code, rule in rules().items() if not select or any(_matches(code, pattern) for pattern in select)]


def _matches(code: str, pattern: str) -> bool:
    pattern = pattern.upper()
    return code.startswith(pattern) or fnmatchcase(code, pattern)


def lint(paths: Iterable[str | os.PathLike[str]], select: Sequence[str] = (), *, cached: bool = True) -> Run:
    """A run with a finding for each report, in the order of the files.

    paths: files, and folders that are searched for `*.py`. select: codes of rules, their beginnings or patterns.
    cached: keep what was read of each file in the user's cache, by its size and time of change. Raises `UsageError` for
    a path that is not there or cannot be read, for an unknown rule, and where no file is Python.
    """
    chosen = select_rules(select)
    read = _Cache(chosen, cached)
    findings, files, broken = list[Finding](), 0, list[str]()
    for path in python_files(paths := list(paths)):
        reports = read.reports(path)
        if reports is None:
            broken.append(path)
        else:
            files += 1
            findings += [_finding(rules()[code], path, report) for code, report in reports]
    read.save()
    names = ", ".join(os.fspath(path) for path in paths)
    if not files:
        where = ", ".join(broken) or names
        raise UsageError(f"lint needs a file of Python; found none in {where:.200}")
    unseen = {UNREAD: len(broken)} if broken else {}
    coverage = Coverage({"files": files, "rules": len(chosen)}, unseen)
    return Run(findings=tuple(findings), coverage=coverage, title=f"lint of {names:.200}")


def _finding(rule: Rule, path: str, report: Report) -> Finding:
    where = Where(file=path, line=report.line)
    build = rule.check.fail if rule.fails else rule.check.warn
    proof = f" Proof: {rule.audit}" if rule.audit else ""
    return commented(build(os.path.basename(path), report.message, where=where, hint=rule.check.fix + proof))


def python_files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[str]:
    """The files, each once, also where it has several names; those of a folder sorted."""
    seen = set[tuple[int, int]]()
    for path in [os.fspath(path) for path in paths]:
        if not os.path.isfile(path) and not os.path.isdir(path):
            raise UsageError(f"there is no file or folder {path}")
        for file in (path,) if os.path.isfile(path) else _inside(path):
            stat = os.stat(file)
            if (identity := (stat.st_dev, stat.st_ino)) not in seen:
                seen.add(identity)
                yield file


def _inside(folder: str) -> Iterator[str]:
    """The files of Python in a folder. Links to folders are not followed: they may lead back."""
    try:
        with os.scandir(folder) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise UsageError(f"cannot read the folder {folder}: {error.strerror}") from error
    for entry in ordered:
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in _SKIPPED and not entry.name.startswith("."):
                yield from _inside(entry.path)
        elif entry.name.endswith(".py") and entry.is_file():
            yield entry.path


def content_of(path: str) -> bytes:
    """The bytes of a file. Raises `UsageError` where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def is_binary(content: bytes) -> bool:
    """Return whether a file is no source, though no rule parses it."""
    return b"\0" in content


def _encoding(content: bytes) -> str:
    """The encoding of a file, by its byte order mark or its comment. Raises `SyntaxError` for an unknown one."""
    return tokenize.detect_encoding(io.BytesIO(content).readline)[0]


def parse(path: str, content: bytes) -> Source | None:
    """A file as rules read it; None of one that is no Python."""
    try:
        with quiet():  # of escapes in the strings of others
            return Source(path, content.decode(_encoding(content)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two of what nests too deeply
        return None


def read_file(path: str, chosen: Sequence[Rule]) -> list[tuple[str, Report]] | None:
    """The reports of a file by the codes of their rules; None of one that is no Python."""
    content = content_of(path)
    if is_binary(content):
        return None
    contains = _Contains(content)
    may_report = [rule for rule in chosen if _may_report(rule, content, contains)]
    if not may_report:
        return []
    source = parse(path, content)
    if source is None:
        return None
    try:
        found = [(rule.check.slug, report) for rule in may_report for report in rule.read(source)]
    except RecursionError:
        return None
    return sorted(found, key=lambda one: (one[1].line, one[0]))


class _Contains(dict[bytes, bool]):
    """Presence of texts in a file, each looked up once."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __missing__(self, needle: bytes) -> bool:
        found = self[needle] = needle in self._content
        return found


def _may_report(rule: Rule, content: bytes, contains: _Contains) -> bool:
    """Return whether a rule may have a report in a file, by its text."""
    if not all(any(contains[needle] for needle in needles) for needles in _needles(rule)):
        return False
    return all(re.search(pattern.encode(), content) for pattern in rule.patterns)


@cache
def _needles(rule: Rule) -> tuple[tuple[bytes, ...], ...]:
    return tuple(tuple(needle.encode() for needle in needles) for needles in rule.needles)


class _Cache:
    """Reports of files by size and time of change, for these rules as they are and this Python."""

    def __init__(self, chosen: Sequence[Rule], enabled: bool) -> None:
        self._chosen = chosen
        codes = "-".join(rule.check.slug for rule in chosen)
        named = hashlib.sha256(f"{_version()} {sys.version_info[:2]} {codes}".encode()).hexdigest()[:32]
        self._path = cache_home() / f"lint-{named}.json"
        self._enabled, self._known, self._changed = enabled, dict[str, list[object]](), False
        if enabled:
            with suppress(OSError, ValueError):
                self._known = dict(json.loads(self._path.read_bytes()))

    def reports(self, path: str) -> list[tuple[str, Report]] | None:
        stat, key = os.stat(path), os.path.abspath(path)
        known = self._known.get(key)
        if known is not None and known[:2] == [stat.st_size, stat.st_mtime_ns]:
            return _reports_of(known[2])
        reports = read_file(path, self._chosen)
        kept = None if reports is None else [[code, report.line, report.message] for code, report in reports]
        self._known[key], self._changed = [stat.st_size, stat.st_mtime_ns, kept], True
        return reports

    def save(self) -> None:
        """Write it, unless nothing is new; a cache that cannot be written is none."""
        if self._enabled and self._changed:
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                temporary = self._path.with_suffix(f".{os.getpid()}")
                temporary.write_text(json.dumps(self._known))
                temporary.replace(self._path)


def _reports_of(kept: object) -> list[tuple[str, Report]] | None:
    if not isinstance(kept, list):
        return None
    return [(code, Report(line, message)) for code, line, message in kept]


@cache
def _version() -> str:
    """Of the source of this room."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def fix(paths: Iterable[str | os.PathLike[str]], select: Sequence[str] = ()) -> int:
    """Write what reports mend by themselves; how many edits were made. Edits that overlap wait for the next time."""
    chosen, made = select_rules(select), 0
    for path in python_files(paths):
        found = read_file(path, chosen) or ()
        edits = [edit for code, report in found if not _is_ignored(path, code, report) for edit in report.fix]
        if edits:
            made += _apply(path, edits)
    return made


def _is_ignored(path: str, code: str, report: Report) -> bool:
    return code in ignored_at(Where(file=path, line=report.line))


def _apply(path: str, edits: Sequence[Edit]) -> int:
    """Columns are those of UTF-8, as `ast` counts them, in whatever encoding the file is."""
    content = content_of(path)
    encoding = _encoding(content)
    lines = split_lines(content.decode(encoding))
    made, limit = 0, (len(lines) + 1, 0)
    for edit in sorted(edits, key=lambda one: (one.line, one.column), reverse=True):
        if (edit.end_line, edit.end_column) > limit or edit.line != edit.end_line:
            continue
        line = lines[edit.line - 1].encode()
        lines[edit.line - 1] = (line[: edit.column] + edit.text.encode() + line[edit.end_column :]).decode()
        limit, made = (edit.line, edit.column), made + 1
    write_atomically(Path(path), "".join(lines).encode(encoding))
    return made
