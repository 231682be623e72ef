"""A run as a comment on a pull request: the verdict, one table, the rest folded. It knows a `Run` and no check."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from ampcheck.core.run import Finding, Run, Table, Verdict
from ampcheck.report.sections import arrange
from ampcheck.report.text import clean, number

LENGTH = 60_000
"""Characters of a comment; GitHub takes 65,536."""

_MARKS = {
    Verdict.FAIL: "❌",
    Verdict.WARN: "⚠️",
    Verdict.UNDECIDED: "❔",
    Verdict.INCOMPLETE: "🚧",
    Verdict.SKIP: "➖",
    Verdict.PASS: "✅",
}
_ACTIVE = re.compile(r"[^\w\s.,;/%'=?]|(?<=\d)\.(?=\s)|_|(?<=www)\.|(?<=WWW)\.")
"""What Markdown or HTML could take for markup, a mention, a reference, a link or a list."""


def comment_of(run: Run) -> str:
    """Markdown of at most `LENGTH` characters. What comes from outside is text in it, never markup or a mention.

    The first line is an HTML comment by which a workflow finds the comment to replace: `<!-- ampcheck speed `, and
    digits that are the same for the same target, mode and precision, or else for the same title.
    """
    content = arrange(run)
    lines = [_marker(run), f"### {_MARKS[content.verdict]} {escaped(run.title)}: {content.headline}", ""]
    for finding in (*content.problems, *content.unjudged, *(run.of(Verdict.PASS) if not content.problems else ())):
        lines += [f"- {_MARKS[finding.verdict]} **{finding.check}**: {escaped(finding.message)}{_hint(finding)}"]
    tables = list(run.tables)
    if tables:
        lines += ["", *_table(tables[0])]
    lines += ["", "<details><summary>Evidence</summary>", ""]
    for table in tables[1:]:
        lines += [f"**{escaped(table.title)}**", "", *_table(table), ""]
    lines += [f"{escaped(name)}: {escaped(number(value))}  " for name, value in run.environment.items()]
    return _fitting([*lines, "", f"Looked at {escaped(str(run.coverage))}."]) + "\n\n</details>\n"


def _marker(run: Run) -> str:
    known = str(run.environment.get("target") or run.title)
    return f"<!-- ampcheck speed {hashlib.sha256(known.encode()).hexdigest()[:8]} -->"


def escaped(text: str) -> str:
    """Text in which no character means anything to Markdown, to HTML or to GitHub."""
    flat = " ".join(clean(text).split())
    return _ACTIVE.sub(lambda found: f"&#{ord(found[0])};", flat)


def _hint(finding: Finding) -> str:
    return f" <sub>Hint: {escaped(finding.hint)}</sub>" if finding.hint else ""


def _table(table: Table) -> Iterator[str]:
    yield _row([escaped(column) for column in table.columns])
    yield "|" + "---|" * len(table.columns)
    for row in table.rows:
        yield _row([escaped(number(value, 4)) for value in row])
    if table.note:
        yield ""
        yield f"<sub>{escaped(table.note)}</sub>"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _fitting(lines: list[str]) -> str:
    kept, left = [], LENGTH
    for line in lines:
        left -= len(line) + 1
        if left < 0:
            kept += ["", "Cut here: the JSON and the page hold everything."]
            break
        kept.append(line)
    return "\n".join(kept)
