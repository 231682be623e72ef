"""How a script keeps what it found: the command, the versions, the hardware's name, and the figures.

What takes long is kept row by row, each with its size, its name, the options and the machine (`fingerprint`) that it
was measured with: a later call measures the rows that are not its own machine's, and leaves all others as they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ampcheck.core.environment import environment
from ampcheck.core.files import write_atomically
from ampcheck.core.run import Scalar
from ampcheck.records.speed import differences

Row = dict[str, Any]
"""What was found of one `name` in one `size`, with the `options` and the `fingerprint` of the measurement."""

Rows = dict[tuple[str, str], Row]
"""By size and name."""

REQUIRED = ("size", "name", "options", "fingerprint")


def write_evidence(
    path: Path,
    data: Mapping[str, Any],
    table: Iterable[str],
    *,
    of_rows: bool = False,
    device: str = "cpu",
    a_line_each: str = "",
) -> None:
    """JSON at `path` and a Markdown table beside it.

    of_rows: each row names the machine that measured it; the machine that writes is left out. device: the hardware.
    a_line_each: a list of the data whose items take a line each; it is written last.
    """
    # A path of this machine says nothing elsewhere: its last part is kept, in capitals, as a name to fill in.
    said = (Path(word).name.upper() if Path(word).is_absolute() else word for word in sys.argv[1:])
    command = " ".join(["python", *sys.argv[:1], *said])
    if of_rows:
        own: dict[str, Any] = {}
        place = "Each part says where it was measured, which need not be where this was written."
    else:
        known = environment(device)
        own = {"environment": known}
        place = f"torch {known['torch']}, {known['device']}, {known['threads']} thread" + "s" * (known["threads"] != 1)
    last = {a_line_each: []} if a_line_each else {}
    text = json.dumps(
        {"command": command, **own, **{key: value for key, value in data.items() if key not in last}, **last}, indent=1
    )
    if a_line_each:
        items = ",\n".join(json.dumps(item, separators=(",", ":")) for item in data[a_line_each])
        text = text.removesuffix("[]\n}") + f"[\n{items}\n]}}"
    write_atomically(path, text + "\n")
    lines = [f"# {path.stem}", "", f"`{command}`", "", place, "", *table]
    write_atomically(path.with_suffix(".md"), "\n".join(lines) + "\n")


def read_rows(path: Path) -> Rows:
    """The rows that evidence holds, of every size and machine; none where there is no file.

    Ends the script where it cannot tell what they are, since it would write without them.
    """
    if not path.is_file():
        return {}
    try:
        held = json.loads(path.read_text(encoding="utf-8"))["rows"]
        if any(name not in row for row in held for name in REQUIRED):
            raise KeyError("a row without " + ", ".join(REQUIRED))
        return {(row["size"], row["name"]): row for row in held}
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is no evidence that this script wrote ({error!r}): move it away") from error


def write_rows(path: Path, rows: Rows, data: Mapping[str, Any], table: Iterable[str]) -> None:
    """All rows, with what was made of them. Ends the script where there is none, and does not change the file."""
    if not rows:
        raise SystemExit(f"nothing was measured, so {path} is not written")
    write_evidence(path, {**data, "rows": list(rows.values())}, table, of_rows=True)


def is_current(row: Row, options: Mapping[str, Any], known: Mapping[str, Scalar]) -> bool:
    """Whether a row is what this machine would measure with these options."""
    return bool(row["options"] == dict(options)) and not differences(row["fingerprint"], known)


def grouped(rows: Rows, order: Sequence[str]) -> Iterator[tuple[str, list[Row]]]:
    """Rows that may be put side by side, of one size and one machine: a title that names both, and the rows."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for name in order:
        for row in rows.values():
            if row["name"] == name:
                groups.setdefault((row["size"], machine_of(row)), []).append(row)
    for (size, machine), held in sorted(groups.items(), key=lambda one: one[0], reverse=True):  # small, then large
        yield f"{size}, on {machine}", held


def machine_of(row: Row) -> str:
    """A row's fingerprint in words."""
    return ", ".join(f"{name} {value}" for name, value in row["fingerprint"].items())


def options_of(row: Row) -> str:
    """A row's options in words."""
    facts = (
        (name, value if isinstance(value, (int, float, str)) else ", ".join(value))
        for name, value in row["options"].items()
    )
    return "; ".join(f"{name}: {value}" for name, value in facts)


def markdown_table(rows: Sequence[Row], columns: Sequence[str] = ()) -> list[str]:
    """The lines of a Markdown table of rows that have the same columns. columns: which of them; None is left empty."""
    columns = columns or list(rows[0] if rows else ())
    lines = [columns, *([str("" if row[name] is None else row[name]) for name in columns] for row in rows)]
    texts = ["| " + " | ".join(line) + " |" for line in lines]
    return [texts[0], "|" + "---|" * len(columns), *texts[1:]]
