"""A run as a comment on a pull request: the verdict, one table, the rest folded. It knows a `Run` and no check."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from ampcheck.core.run import Finding, Run, Table, Verdict, follow_line
from ampcheck.report.sections import Sections, arrange
from ampcheck.report.text import clean, number, shortened

LENGTH = 60_000
"""Characters of a comment; GitHub takes 65,536."""

_MARKS = {
    Verdict.FAIL: "❌",
    Verdict.WARN: "⚠️",
    Verdict.UNDECIDED: "❔",
    Verdict.INCOMPLETE: "🚧",
    Verdict.ACCEPTED: "☑️",
    Verdict.SKIP: "➖",
    Verdict.PASS: "✅",
}
_QUIET = (Verdict.ACCEPTED, Verdict.SKIP, Verdict.PASS)
_FEW = 3
"""More findings of a quiet verdict are one line of counts."""
_OF_TABLES = ("speed", "compare", "sweep", "bisect")
"""Kinds of runs whose first table is the result; other tables are evidence, and folded."""
_REST = "The rest is left out; the JSON file and the HTML page contain all."
_ACTIVE = re.compile(r"[^\w\s.,;/%'=?-]|(?<!\w)-|-(?!\w)|(?<=\d)\.(?=\s)|_|(?<=www)\.|(?<=WWW)\.")
"""Characters that Markdown or HTML could take for markup, a mention, a reference, a link or a list."""

_MARKUP = re.compile(r"[\\`*\[\]<>|~$&]|(?<!\w)_|_(?!\w)")
"""Characters that Markdown takes for markup inside of a line."""


def comment_of(run: Run, kind: str = "audit") -> str:
    """Markdown of at most `LENGTH` characters. Text from outside is escaped: no markup, no mention.

    kind: what the run is of, such as audit, policy or speed. The first line is an HTML comment by which a workflow
    finds the comment to replace: `<!-- ampcheck KIND `, and digits that are the same for the same target, mode and
    precision, or else for the same title.
    """
    content = arrange(run)
    key = hashlib.sha256(str(run.environment.get("target") or run.title).encode("utf-8", "replace")).hexdigest()[:8]
    title = f"{escaped(run.title)}: " if run.title else ""
    heading = f"### {_MARKS[content.verdict]} {title}{escaped(content.headline)}"
    quiet = {v: findings for v in _QUIET if len(findings := run.of(v)) > _FEW}
    tables = list(run.tables)
    shown = [f"<!-- ampcheck {kind} {key} -->", heading, "", *_findings(run, content, quiet)]
    if kind in _OF_TABLES and tables:
        shown += ["", *_table(tables.pop(0))]
    lines = list(_first(shown, LENGTH * 3 // 4))
    left = LENGTH - sum(len(line) + 1 for line in lines)
    folded = _first(list(_evidence(run, content, quiet, tables)), left)
    return "\n".join((*lines, "", "<details><summary>Evidence</summary>", "", *folded, "", "</details>", ""))


def _findings(run: Run, content: Sections, quiet: Collection[Verdict]) -> Iterator[str]:
    """Problems, what was not judged, and passes if there is no problem; of a `quiet` verdict the counts."""
    names = _names(content)
    for cause in content.causes:
        yield _item(cause.finding, names)
        if cause.following:
            yield f"  - {escaped(follow_line(cause.following))}"
    for verdict in (Verdict.UNDECIDED, Verdict.INCOMPLETE, *_QUIET):
        if verdict in quiet:
            yield _counts(verdict, run.of(verdict))
        elif verdict is not Verdict.PASS or not content.causes:
            yield from (_item(finding, names) for finding in run.of(verdict))


def _evidence(run: Run, content: Sections, quiet: Collection[Verdict], tables: Iterable[Table]) -> Iterator[str]:
    """Yield what was counted above, but for passes; tables, environment and coverage."""
    for verdict in quiet:
        if verdict is not Verdict.PASS:
            yield from (_item(finding, _names(content)) for finding in run.of(verdict))
    yield ""
    for table in tables:
        title = escaped(table.title)
        yield from ((f"**{title}**", "") if title else ())  # **** alone would be a rule
        yield from (*_table(table), "")
    for name, value in run.environment.items():
        yield f"{escaped(name)}: {escaped(number(value))}  "
    yield from ("", f"Looked at {escaped(str(run.coverage))}.")


def _names(content: Sections) -> Mapping[str, str]:
    """Return how subjects differ in their names; nothing for the only one, which the title names."""
    return content.heads if len(content.subjects) > 1 else {}


def tables_of(run: Run) -> str:
    """The headline of a run and its tables as a Markdown file of any length that people can read without a renderer."""
    content = arrange(run)
    lines = [f"# {_literal(run.title)}", "", f"{_MARKS[content.verdict]} {content.headline}"]
    for table in run.tables:
        lines += ["", f"## {_literal(table.title)}", "", *_table(table, _literal)]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """At most 2,000 characters of a text, none of which is special to Markdown, to HTML or to GitHub."""
    flat = shortened(" ".join(clean(text).split()))
    return _ACTIVE.sub(lambda match: f"&#{ord(match[0])};", flat)


def _literal(text: str) -> str:
    """A text in a file, which mentions and links nobody: a backslash before each character that is markup there."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(clean(text).split()))


def _item(finding: Finding, names: Mapping[str, str]) -> str:
    name = names.get(finding.subject, "")
    parts = [f"- {_MARKS[finding.verdict]} **{escaped(finding.check)}**{f' ({escaped(name)})' if name else ''}: "]
    parts += [escaped(finding.message)]
    parts += [f"<br>accepted {escaped(finding.accepted)}"] if finding.accepted else []
    parts += [f"<br>{escaped(where)}"] if (where := str(finding.where)) else []
    if finding.code and finding.code not in finding.message:
        parts.append(f"<br><code>{escaped(finding.code)}</code>")
    parts += [f"<br>reproduce: <code>{escaped(finding.reproduce)}</code>"] if finding.reproduce else []
    parts += [f" <sub>Hint: {escaped(finding.hint)}</sub>"] if finding.hint else []
    return "".join(parts)


def _counts(verdict: Verdict, findings: Sequence[Finding]) -> str:
    counts = Counter(finding.check for finding in findings)
    names = ", ".join(f"{escaped(check)}{f' ×{count:,}' if count > 1 else ''}" for check, count in counts.items())
    return f"- {_MARKS[verdict]} {verdict}: {names}"


def _table(table: Table, escape: Callable[[str], str] = escaped) -> Iterator[str]:
    if not table.columns:
        return
    yield f"| {' | '.join(map(escape, table.columns))} |"
    yield "|" + "---|" * len(table.columns)
    for row in table.rows:
        yield f"| {' | '.join(escape(number(value, 4)) for value in row)} |"
    if table.note:
        yield ""
        yield f"<sub>{escape(table.note)}</sub>"


def _first(lines: Sequence[str], left: int) -> Iterator[str]:
    """The lines that fit into `left` characters."""
    left -= len(_REST) + 2
    for line in lines:
        left -= len(line) + 1
        if left < 0:
            yield from ("", _REST)
            return
        yield line
