"""Tables of evidence on a terminal: side by side where words fit, else a paragraph for each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from ampcheck.core.run import Table
from ampcheck.report.text import MIN_WIDTH, cells, clean, is_number, wrap

if TYPE_CHECKING:
    import rich.table

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
