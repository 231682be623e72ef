"""A run on a terminal: plain lines for pytest; with colours and a table of verdicts for the command line."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from ampcheck.core.progress import Progress
from ampcheck.core.run import Coverage, Finding, Run, Table, Verdict, follow_line
from ampcheck.report.sections import CheckSection, Sections, arrange, short_names
from ampcheck.report.text import MIN_WIDTH, cells, clean, is_number, one_line, quantity, wrap

if TYPE_CHECKING:
    import rich.table
    from rich.console import Console
    from rich.text import Text

_STYLES = {
    Verdict.FAIL: "bold red",
    Verdict.WARN: "yellow",
    Verdict.UNDECIDED: "magenta",
    Verdict.INCOMPLETE: "cyan",
    Verdict.ACCEPTED: "dim",
    Verdict.SKIP: "dim",
    Verdict.PASS: "green",
}
_SUBJECT_WIDTH = 12  # at least, in the table of verdicts
_MANY_SUBJECTS = 16  # for more, the table counts verdicts


def summary_lines(run: Run, *, width: int, verbose: bool = False) -> Iterator[str]:
    """`run` as plain lines of at most `width` columns, but at least `MIN_WIDTH`.

    The headline; failures and warnings in full, what follows from one in a line beneath it, or with `verbose` in full
    too; skipped and undecided checks with the reason; passes as counts for each
    check, or with `verbose` one line for each; the coverage.
    """
    content = arrange(run)
    width = max(width, MIN_WIDTH)
    yield from wrap(_heading(content), width, hanging="  ")
    yield from problem_lines(content, width, verbose=verbose)
    yield from _unjudged(content, width, verbose)
    yield from _passes(content, width, verbose)
    yield from _coverage(content.coverage, width)


def problem_lines(content: Sections, width: int, *, verbose: bool = False) -> Iterator[str]:
    """Failures and warnings in full, with what follows from each beneath it."""
    for finding, following in zip(content.problems, content.following, strict=True):
        yield from _in_full(finding, width)
        yield from _following(following, width, verbose)


def print_run(run: Run, console: Console, *, verbose: bool = False, quiet: bool = False) -> None:
    """Print `run` to a rich console: headline, a table of verdicts by check and subject, then as `summary_lines`.

    quiet: the headline, failures and warnings alone.
    """
    from rich.text import Text

    content = arrange(run)
    width = max(console.width, MIN_WIDTH)

    def show(lines: Iterable[str], style: str = "") -> None:
        for line in lines:
            console.print(Text(line, style=style), soft_wrap=True)  # a str would be parsed as markup

    show(wrap(_heading(content), width, hanging="  "), _STYLES[content.verdict])
    for table in () if quiet else _verdict_tables(content, width):
        console.print(table)
    for finding, following in zip(content.problems, content.following, strict=True):
        title, *body = _in_full(finding, width)
        show([title], _STYLES[finding.verdict])
        show(body)
        show(_following(following, width, verbose))
    if quiet:
        return
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
    if finding.code and finding.code not in finding.message:
        yield f"    {one_line(finding.code, width - 4)}"
    if numbers := _numbers(finding):
        yield from wrap(numbers, width, indent="  ", hanging="    ")
    if finding.hint:
        yield from wrap(f"hint: {finding.hint}", width, indent="  ", hanging="    ")


def _following(following: Sequence[Finding], width: int, verbose: bool) -> Iterator[str]:
    if following:
        yield f"  {one_line(follow_line(following), width - 2)}" if not verbose else "  it explains:"
    for finding in following if verbose else ():
        yield from (f"    {line}" for line in _in_full(finding, max(width - 4, MIN_WIDTH)))


def _numbers(finding: Finding) -> str:
    named = (("observed", finding.observed), ("limit", finding.limit))
    return ", ".join(f"{name}: {quantity(value, finding.unit)}" for name, value in named if value is not None)


def _unjudged(content: Sections, width: int, verbose: bool) -> Iterator[str]:
    """Each reason once, with the number of subjects; without `verbose`, a skip in one line."""
    reasons = [(f.verdict, f.check, f.accepted or f.message, f.hint) for f in content.unjudged]
    for (verdict, check, message, hint), times in Counter(reasons).items():
        advice = f" (hint: {hint})" if hint and verdict is Verdict.INCOMPLETE else ""
        line = f"{verdict} {check}{f' ×{times:,}' if times > 1 else ''}: {message}{advice}"
        short = verdict in (Verdict.SKIP, Verdict.ACCEPTED) and not verbose
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


def _verdict_tables(content: Sections, width: int) -> Iterator[rich.table.Table]:
    """Verdicts by check and subject, in several tables if the width requires it; counts for very many subjects."""
    judged = [section for section in content.checks if section.findings]
    if not judged:
        return
    if len(content.subjects) > _MANY_SUBJECTS:
        columns = list(content.counts)
        counts = [[_cell(section.counts.get(verdict, 0), verdict) for verdict in columns] for section in judged]
        yield _table(judged, [f"{verdict}" for verdict in columns], counts, width)
        return
    slugs = max(len(section.check) for section in judged)
    heads = short_names(content.subjects)
    side_by_side = max(1, (width - min(slugs, width // 2)) // (_SUBJECT_WIDTH + 2))
    for start in range(0, len(content.subjects), side_by_side):
        subjects = content.subjects[start : start + side_by_side]
        names = [heads[name] for name in subjects]
        shown = [section for section in judged if any(section.worst_of(name)[0] for name in subjects)]
        yield _table(shown, names, [[_cell(*section.worst_of(name)) for name in subjects] for section in shown], width)


def _table(
    judged: Sequence[CheckSection], columns: Iterable[str], rows: Sequence[Sequence[Text]], total: int
) -> rich.table.Table:
    from rich import box
    from rich import table as rich_table
    from rich.text import Text

    heads = ["check", *map(clean, columns)]
    lines = [[clean(section.check), *(cell.plain for cell in row)] for section, row in zip(judged, rows, strict=True)]
    widths = _widths(list(zip(heads, *lines, strict=True)), total)
    table = rich_table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(Text(head), overflow="fold", width=widths[number] if widths else None)
    for section, row in zip(judged, rows, strict=True):
        table.add_row(Text(clean(section.check)), *row)
    return table


def _cell(count: int, verdict: Verdict) -> Text:
    from rich.text import Text

    name = verdict.upper() if verdict is Verdict.FAIL else verdict.value
    return Text(f"{name} ×{count:,}" if count > 1 else name, _STYLES[verdict]) if count else Text("·", "dim")


_GAP, _EDGES = 3, 2  # between two columns, and at both sides, as rich draws them


def print_tables(tables: Sequence[Table]) -> None:
    """Print each table with its title and note.

    Long cells are folded, never cut. If the columns do not fit without breaking words, each row becomes a paragraph:
    its first cell, then the others with the names of their columns.
    """
    from rich import text
    from rich.console import Console

    console = Console()
    for shown in tables:
        console.print(text.Text(("\n" if shown is not tables[0] else "") + clean(shown.title), "bold"))
        lines = [[_shown(cell) for cell in row] for row in shown.rows]
        columns = list(zip(map(clean, shown.columns), *lines, strict=True))
        if shown.rows and (widths := _widths(columns, console.width)) is not None:
            console.print(_side_by_side(shown, widths))
        else:
            for line in _paragraphs(shown, max(console.width, MIN_WIDTH)):
                console.print(text.Text(line), soft_wrap=True)
        if shown.note:
            console.print(text.Text(clean(shown.note)))


def _widths(columns: Sequence[Sequence[str]], total: int) -> list[int] | None:
    """The widths of the columns in a table of width `total`; None if words would have to be broken.

    rich's own widths are not used: they cut words at the end of a column where all of them nearly fit.
    Cells of the first column, which names the row, are not folded; of the others the widest are folded first.
    """
    most = [max(cells(text) for text in column) for column in columns]
    least = [max(cells(word) for text in column for word in text.split() or [""]) for column in columns]
    widths = [most[0], *least[1:]]
    spare = total - sum(widths) - _GAP * (len(columns) - 1) - _EDGES
    if spare < 0:
        return None
    for _ in range(spare):
        folded = max(range(len(columns)), key=lambda number: most[number] - widths[number])
        widths[folded] += most[folded] > widths[folded]
    return widths


def _side_by_side(shown: Table, widths: Sequence[int]) -> rich.table.Table:
    from rich import box, table, text

    printed = table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, cell, width in zip(shown.columns, shown.rows[0], widths, strict=True):
        side: Literal["left", "right"] = "right" if is_number(cell) else "left"
        printed.add_column(text.Text(clean(column)), justify=side, overflow="fold", width=max(width, 1))
    for row in shown.rows:
        printed.add_row(*(text.Text(_shown(cell)) for cell in row))
    return printed


def _paragraphs(shown: Table, width: int) -> Iterator[str]:
    for row in shown.rows:
        yield from wrap(_shown(row[0]), width, hanging="  ")
        named = zip(shown.columns[1:], row[1:], strict=True)
        cells_of_row = "; ".join(f"{column}: {text}" for column, cell in named if (text := _shown(cell)))
        yield from wrap(cells_of_row, width, indent="    ", hanging="    ")


def _shown(cell: object) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:.3g}" if isinstance(cell, float) else clean(str(cell)).strip()


EVERY = 10.0
"""Seconds between two lines if stderr is no terminal, as in the log of a CI job."""


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on a terminal, occasional lines elsewhere; on stderr, so that stdout contains only the report."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield show


def _lines() -> Progress:
    """Print a line every `EVERY` seconds; a shorter run prints none."""
    begin = last = time.monotonic()

    def show(stage: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= EVERY:
            last = now
            print(f"ampcheck: {now - begin:.0f} s, {done} of {total} done, now: {stage}", file=sys.stderr, flush=True)

    return show
