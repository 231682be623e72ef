"""The tables of what is blamed."""

from __future__ import annotations

from ampcheck.core.run import Table
from ampcheck.core.source import op_name
from ampcheck.records.blame import CODE, BlameStats

LISTED = 12


def is_code(table: Table) -> bool:
    """Return whether the rows of a table are lines of code, to be printed as they are."""
    return table.title.startswith(CODE)


def tables(stats: BlameStats) -> tuple[Table, ...]:
    """The stages, the faults of eager mode, the modules to keep in float32 and the code that keeps them."""
    result = []
    if stats.stages:
        rows = [(stage.name, stage.output, stage.gradient, stage.verdict) for stage in stats.stages]
        columns = ("stage", "worst output", "worst gradient", "verdict")
        note = "Relative errors against float64."
        result.append(Table(f"Stages: {stats.subject}", columns, rows, "blame", note))
    if stats.faults:
        result.append(_first_faults(stats))
    minimised = stats.minimised
    if minimised is not None and minimised.names is not None:
        names = [(name or "(the root)",) for name in minimised.names]
        count = f"{minimised.runs} run{'s' * (minimised.runs != 1)}"
        note = f"Searched in {count}, {'minimal' if minimised.minimal else 'not known to be minimal'}."
        if stats.cost is None:
            note += f" {stats.uncosted}".rstrip()
        elif not stats.cost.decided:  # a decided one is in the verdict
            note += f" Step time: {stats.cost}."
        result.append(Table(f"Kept in float32: {stats.subject}", ("module",), names, "blame", note))
        lines = [(line,) for line in stats.code.splitlines()]
        result.append(Table(f"{CODE}: {stats.subject}", ("code",), lines, "blame"))
    return tuple(result)


def _first_faults(stats: BlameStats) -> Table:
    rows = [
        (
            op_name(fault.where),
            fault.kind,
            fault.where.phase,
            fault.where.module or "(the root)",
            f"{fault.where.file.rpartition('/')[2]}:{fault.where.line}" if fault.where.file else "",
            float("inf") if fault.examination.lost else fault.examination.error,
            fault.examination.limit,
        )
        for fault in stats.faults[:LISTED]
    ]
    columns = ("op", "fault", "phase", "module", "line", "error", "limit")
    more = len(stats.faults) - len(rows)
    note = "Relative errors against the exact values of the same run" + (f"; {more} more follow." if more else ".")
    return Table(f"First ops at fault: {stats.subject}", columns, rows, "blame", note)
