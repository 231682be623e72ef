"""A run as a comment on a pull request: the verdict, one table, the rest folded. It knows a `Run` and no check."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from ampcheck.core.run import Finding, Run, Table, Verdict, follow_line
from ampcheck.report.sections import arrange
from ampcheck.report.text import clean, number

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
_ACTIVE = re.compile(r"[^\w\s.,;/%'=?]|(?<=\d)\.(?=\s)|_|(?<=www)\.|(?<=WWW)\.")
"""What Markdown or HTML could take for markup, a mention, a reference, a link or a list."""


def comment_of(run: Run) -> str:
    """Markdown of at most `LENGTH` characters. Text from outside is escaped: no markup, no mention.

    The first line is an HTML comment by which a workflow finds the comment to replace: `<!-- ampcheck speed `, and
    digits that are the same for the same target, mode and precision, or else for the same title.
    """
    content = arrange(run)
    key = hashlib.sha256(str(run.environment.get("target") or run.title).encode()).hexdigest()[:8]
    lines = [f"<!-- ampcheck speed {key} -->"]
    lines += [f"### {_MARKS[content.verdict]} {escaped(run.title)}: {content.headline}", ""]
    passes = run.of(Verdict.PASS) if not content.problems else ()
    for finding, following in zip(content.problems, content.following, strict=True):
        lines += [_item(finding), *([f"  - {escaped(follow_line(following))}"] if following else [])]
    lines += [_item(finding) for finding in (*content.unjudged, *passes)]
    if run.tables:
        lines += ["", *_table(run.tables[0])]
    lines += ["", "<details><summary>Evidence</summary>", ""]
    for table in run.tables[1:]:
        lines += [f"**{escaped(table.title)}**", "", *_table(table), ""]
    lines += [f"{escaped(name)}: {escaped(number(value))}  " for name, value in run.environment.items()]
    lines += ["", f"Looked at {escaped(str(run.coverage))}."]
    return "\n".join(_first(lines)) + "\n\n</details>\n"


def tables_of(run: Run) -> str:
    """The headline of a run and its tables as Markdown of any length. Text from outside is escaped."""
    content = arrange(run)
    lines = [f"# {escaped(run.title)}", "", f"{_MARKS[content.verdict]} {content.headline}"]
    for table in run.tables:
        lines += ["", f"## {escaped(table.title)}", "", *_table(table)]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Text without any character that is special to Markdown, to HTML or to GitHub."""
    flat = " ".join(clean(text).split())
    return _ACTIVE.sub(lambda match: f"&#{ord(match[0])};", flat)


def _item(finding: Finding) -> str:
    hint = f" <sub>Hint: {escaped(finding.hint)}</sub>" if finding.hint else ""
    return f"- {_MARKS[finding.verdict]} **{finding.check}**: {escaped(finding.message)}{hint}"


def _table(table: Table) -> Iterator[str]:
    yield f"| {' | '.join(escaped(column) for column in table.columns)} |"
    yield "|" + "---|" * len(table.columns)
    for row in table.rows:
        yield f"| {' | '.join(escaped(number(value, 4)) for value in row)} |"
    if table.note:
        yield ""
        yield f"<sub>{escaped(table.note)}</sub>"


def _first(lines: list[str]) -> Iterator[str]:
    """The lines that fit into `LENGTH` characters."""
    left = LENGTH
    for line in lines:
        left -= len(line) + 1
        if left < 0:
            yield from ("", "The rest is left out; the JSON file and the HTML page contain all.")
            return
        yield line
