"""A run as one self-contained HTML page without scripts."""

from __future__ import annotations

import os
from functools import cache
from itertools import count, zip_longest
from typing import TYPE_CHECKING

from ampcheck.core.files import write_atomically
from ampcheck.core.run import Chart, Finding, Run, Table, Verdict, follow_line
from ampcheck.report.sections import arrange, short_names
from ampcheck.report.text import clean, is_number, number, quantity

if TYPE_CHECKING:
    from jinja2 import Template

_MARKS = {
    Verdict.FAIL: "✕",
    Verdict.WARN: "!",
    Verdict.UNDECIDED: "?",
    Verdict.INCOMPLETE: "…",
    Verdict.ACCEPTED: "~",
    Verdict.SKIP: "–",
    Verdict.PASS: "✓",
}


def write_html(run: Run, path: str | os.PathLike[str]) -> None:
    """Write the page of `run` to `path`. Raises `UsageError` if that is not possible."""
    write_atomically(path, render_html(run))


def render_html(run: Run) -> str:
    """The page of `run`; the same text for the same run.

    Names, messages and paths are escaped; a content security policy forbids scripts and other files.
    """
    from markupsafe import Markup

    from ampcheck.report.charts import chart_svg

    content = arrange(run)
    keys = count(1)

    def draw(chart: Chart) -> Markup:
        return Markup(chart_svg(chart, key=f"chart-{next(keys)}"))  # an XML serialiser escaped its text

    numbers = {id(finding): index for index, finding in enumerate(content.problems, 1)}
    below = {id(finding): following for finding, following in zip(content.problems, content.following, strict=True)}

    def following(finding: Finding) -> str:
        return follow_line(below[id(finding)]) if below.get(id(finding)) else ""

    def card(finding: Finding) -> int | None:
        return numbers.get(id(finding))

    return _template().render(content=content, draw=draw, following=following, card=card)


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("ampcheck.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: clean(value) if type(value) is str else value,  # markup is no text
    )
    environment.globals.update(number=number, quantity=quantity, marks=_MARKS, numeric_columns=_numeric_columns)
    environment.globals.update(short_names=short_names)
    return environment.get_template("run.html.j2")


def _numeric_columns(table: Table) -> set[int]:
    """The columns of numbers and gaps, which are aligned at the right."""
    columns = [[value for value in column if value is not None] for column in zip_longest(*table.rows)]
    return {index for index, values in enumerate(columns) if values and all(map(is_number, values))}
