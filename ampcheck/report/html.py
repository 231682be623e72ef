"""A run as one self-contained HTML page: what failed, the model as a map, the evidence."""

from __future__ import annotations

import hashlib
import os
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from itertools import zip_longest
from typing import TYPE_CHECKING

from ampcheck.core.files import write_atomically
from ampcheck.core.run import Finding, Run, Table, Verdict, follow_line
from ampcheck.report.charts import draw_chart
from ampcheck.report.maps import map_view, site_of, values_around
from ampcheck.report.sections import arrange
from ampcheck.report.text import clean, is_number, number, quantity

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

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

    Names, messages and paths are escaped; a content security policy forbids other files, and every script but the
    page's own, which filters findings: without it the page shows all.
    """
    content = arrange(run)
    cells: dict[tuple[str, str], list[Finding]] = {}
    for section in content.checks:
        for finding in section.findings:
            cells.setdefault((section.check, finding.subject), []).append(finding)
    unjudged = _grouped(content.unjudged)
    shown = [(*cause.twins, *cause.following) for cause in content.causes] + [group for _, group in unjudged]
    ids = {id(finding): f"finding-{n}" for n, group in enumerate(shown, 1) for finding in group}
    stories = [
        (verdict, title, [cause for cause in content.causes if cause.twins[0].verdict is verdict])
        for verdict, title in ((Verdict.FAIL, "What failed"), (Verdict.WARN, "Warnings"))
    ]

    def values(finding: Finding) -> Markup | None:
        site = site_of(finding, run.maps)
        return values_around(*site) if site is not None else None

    return _template().render(
        content=content,
        stories=[story for story in stories if story[2]],
        cells=cells,
        draw=draw_chart,
        maps=[map_view(model_map, run.findings) for model_map in run.maps],
        values=values,
        anchor=lambda finding: ids.get(id(finding), "passed"),
        subjects={subject: n for n, subject in enumerate(content.subjects)},
        checks={section.check: n for n, section in enumerate(content.checks)},
        modules=sorted({f.where.module for f in run.findings} | {s.module for m in run.maps for s in m.sites}),
        unjudged=unjudged,
    )


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("ampcheck.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: clean(value) if type(value) is str else value,  # markup is no text
    )
    assert environment.loader is not None
    script, style = (environment.loader.get_source(environment, name)[0].strip() for name in ("page.js", "style.css"))
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals.update(script=Markup(script), style=Markup(style), script_digest=digest)
    environment.globals.update(number=number, quantity=quantity, marks=_MARKS, numeric_columns=_numeric_columns)
    environment.globals.update(follow_line=follow_line)
    return environment.get_template("run.html.j2")


def _numeric_columns(table: Table) -> set[int]:
    """The columns of numbers and gaps, which are aligned at the right."""
    columns = [[value for value in column if value is not None] for column in zip_longest(*table.rows)]
    return {index for index, values in enumerate(columns) if values and all(map(is_number, values))}


def _grouped(findings: Sequence[Finding]) -> list[tuple[Finding, tuple[Finding, ...]]]:
    """Findings that differ in their subject alone, as the first of them and all."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        same = finding.check, finding.verdict, finding.message, finding.hint, finding.accepted, str(finding.where)
        groups.setdefault(same, []).append(finding)
    return [(group[0], tuple(group)) for group in groups.values()]
