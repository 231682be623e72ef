"""A run on a terminal: plain lines for pytest; with colours and a table of verdicts for the command line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ampcheck.core.run import Coverage, Finding, Run, Verdict
from ampcheck.report.sections import CheckSection, Sections, arrange, short_names
from ampcheck.report.text import MIN_WIDTH, clean, one_line, quantity, wrap

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_STYLES = {
    Verdict.FAIL: "bold red",
    Verdict.WARN: "yellow",
    Verdict.UNDECIDED: "magenta",
    Verdict.INCOMPLETE: "cyan",
    Verdict.SKIP: "dim",
    Verdict.PASS: "green",
}
_SUBJECT_WIDTH = 12  # at least, in the table of verdicts
_MANY_SUBJECTS = 16  # for more, the table counts verdicts


def summary_lines(run: Run, *, width: int, verbose: bool = False) -> Iterator[str]:
    """`run` as plain lines of at most `width` columns, but at least `MIN_WIDTH`.

    The headline; failures and warnings in full; skipped and undecided checks with the reason; passes as counts for each
    check, or with `verbose` one line for each; the coverage.
    """
    content = arrange(run)
    width = max(width, MIN_WIDTH)
    yield from wrap(_heading(content), width, hanging="  ")
    for finding in content.problems:
        yield from _in_full(finding, width)
    yield from _unjudged(content, width, verbose)
    yield from _passes(content, width, verbose)
    yield from _coverage(content.coverage, width)


def print_run(run: Run, console: Console, *, verbose: bool = False) -> None:
    """Print `run` to a rich console: headline, a table of verdicts by check and subject, then as `summary_lines`."""
    from rich.text import Text

    content = arrange(run)
    width = max(console.width, MIN_WIDTH)

    def show(lines: Iterable[str], style: str = "") -> None:
        for line in lines:
            console.print(Text(line, style=style), soft_wrap=True)  # a str would be parsed as markup

    show(wrap(_heading(content), width, hanging="  "), _STYLES[content.verdict])
    for table in _verdict_tables(content, width):
        console.print(table)
    for finding in content.problems:
        title, *body = _in_full(finding, width)
        show([title], _STYLES[finding.verdict])
        show(body)
    show(_unjudged(content, width, verbose), _STYLES[Verdict.SKIP])
    show(_passes(content, width, verbose), _STYLES[Verdict.PASS])
    show(_coverage(content.coverage, width, listed=True))


def _heading(content: Sections) -> str:
    return f"{content.title}: {content.headline}" if content.title else content.headline


def _in_full(finding: Finding, width: int) -> Iterator[str]:
    title = f"{finding.verdict.upper()} {finding.check}: {finding.subject}"
    yield from wrap(title, width, hanging="  ")
    yield from wrap(finding.message, width, indent="  ", hanging="  ")
    if where := str(finding.where):
        yield from wrap(f"where: {where}", width, indent="  ", hanging="    ")
    if numbers := _numbers(finding):
        yield from wrap(numbers, width, indent="  ", hanging="    ")
    if finding.hint:
        yield from wrap(f"hint: {finding.hint}", width, indent="  ", hanging="    ")


def _numbers(finding: Finding) -> str:
    named = (("observed", finding.observed), ("limit", finding.limit))
    return ", ".join(f"{name}: {quantity(value, finding.unit)}" for name, value in named if value is not None)


def _unjudged(content: Sections, width: int, verbose: bool) -> Iterator[str]:
    """Each reason once, with the number of subjects; without `verbose`, a skip in one line."""
    count = Counter((finding.verdict, finding.check, finding.message, finding.hint) for finding in content.unjudged)
    for (verdict, check, message, hint), times in count.items():
        advice = f" (hint: {hint})" if hint and verdict is Verdict.INCOMPLETE else ""
        line = f"{verdict} {check}{f' ×{times:,}' if times > 1 else ''}: {message}{advice}"
        short = verdict is Verdict.SKIP and not verbose
        yield from (one_line(line, width),) if short else wrap(line, width, hanging="  ")


def _passes(content: Sections, width: int, verbose: bool) -> Iterator[str]:
    passed = [section for section in content.checks if section.passes]
    if verbose:
        for section in passed:
            for finding in section.passes:
                yield from wrap(f"pass {finding.check}: {finding.subject}: {finding.message}", width, hanging="  ")
    elif passed:
        counts = ", ".join(f"{section.check} {len(section.passes):,}" for section in passed)
        yield from wrap(f"passed: {counts}", width, hanging="  ")


def _coverage(coverage: Coverage, width: int, *, listed: bool = False) -> Iterator[str]:
    seen = f"coverage: {coverage if coverage.total else 'nothing was looked at'}"
    reasons = [f"{reason} ({count:,})" for reason, count in coverage.unseen.items()]
    if reasons and not listed:
        seen += f"; not seen: {', '.join(reasons)}"
    yield from wrap(seen, width, hanging="  ")
    if listed:
        for reason in reasons:
            yield from wrap(f"not seen: {reason}", width, indent="  ", hanging="    ")


def _verdict_tables(content: Sections, width: int) -> Iterator[Table]:
    """Verdicts by check and subject, in several tables if the width requires it; counts for very many subjects."""
    judged = [section for section in content.checks if section.findings]
    if not judged:
        return
    if len(content.subjects) > _MANY_SUBJECTS:
        columns = list(content.counts)
        cells = [[_cell(section.counts.get(verdict, 0), verdict) for verdict in columns] for section in judged]
        yield _table(judged, [f"{verdict}" for verdict in columns], cells)
        return
    slugs = max(len(section.check) for section in judged)
    heads = short_names(content.subjects)
    side_by_side = max(1, (width - min(slugs, width // 2)) // (_SUBJECT_WIDTH + 2))
    for start in range(0, len(content.subjects), side_by_side):
        subjects = content.subjects[start : start + side_by_side]
        names = [heads[name] for name in subjects]
        shown = [section for section in judged if any(section.worst_of(name)[0] for name in subjects)]
        yield _table(shown, names, [[_cell(*section.worst_of(name)) for name in subjects] for section in shown])


def _table(judged: Sequence[CheckSection], columns: Iterable[str], cells: Iterable[Iterable[Text]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", overflow="fold", min_width=min(max(len(section.check) for section in judged), 24))
    for column in columns:
        table.add_column(Text(clean(column)), overflow="fold")
    for section, row in zip(judged, cells, strict=True):
        table.add_row(Text(clean(section.check)), *row)
    return table


def _cell(count: int, verdict: Verdict) -> Text:
    from rich.text import Text

    name = verdict.upper() if verdict is Verdict.FAIL else verdict.value
    return Text(f"{name} ×{count:,}" if count > 1 else name, _STYLES[verdict]) if count else Text("·", "dim")
