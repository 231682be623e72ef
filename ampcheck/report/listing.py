"""Tables of a run as a terminal shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ampcheck.record import Table


def print_tables(tables: Sequence[Table]) -> None:
    """Print tables one below the other, each with its title and note; long cells are folded, never cut."""
    from rich import box, table, text
    from rich.console import Console

    console = Console()
    for shown in tables:
        console.print(text.Text(("\n" if shown is not tables[0] else "") + shown.title, "bold"))
        if shown.rows:
            printed = table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for number, (column, cell) in enumerate(zip(shown.columns, shown.rows[0], strict=True)):
                side: Literal["left", "right"] = "right" if isinstance(cell, (int, float)) else "left"
                # What stands first names the row: the other columns give way.
                printed.add_column(column, justify=side, overflow="fold", no_wrap=not number)
            for row in shown.rows:
                printed.add_row(*(text.Text(_cell(cell)) for cell in row))
            console.print(printed)
        if shown.note:
            console.print(text.Text(shown.note))


def _cell(cell: object) -> str:
    if cell is None:
        return ""
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)
