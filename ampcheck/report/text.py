"""Text for people: numbers, quantities, names that fit, lines that fit."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from decimal import Decimal

from ampcheck.core.run import Scalar
from ampcheck.core.text import cells as cells
from ampcheck.core.text import clean as clean
from ampcheck.core.text import fitting, singular
from ampcheck.core.text import is_number as is_number

MIN_WIDTH = 20
"""Width of the lines on narrower terminals."""


def number(value: Scalar, digits: int = 3) -> str:
    """A value as text: `1,234`, `6.55e4`, `0.031`, `nan`, `-inf`, `yes`. `digits`: significant ones of a fraction."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    size = abs(value)
    if isinstance(value, int):
        return f"{value:,}" if size < 10**15 else _scientific(f"{Decimal(value):.{digits - 1}e}")
    if not math.isfinite(value):
        return str(value)
    if size < 1e5 and (value == int(value) or size >= 999.5):
        return f"{value:,.0f}"
    if 1e-3 <= size < 999.5:
        return f"{value:.{digits}g}"
    return _scientific(f"{value:.{digits - 1}e}")


def _scientific(text: str) -> str:
    mantissa, exponent = text.split("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"


def quantity(value: float | None, unit: str) -> str:
    """A number with its unit, such as `0.31 %`; empty for None."""
    if value == 1 and " " not in unit:
        unit = singular(unit)
    return "" if value is None else f"{number(value)} {unit}".rstrip()


def shorten_middle(text: str, length: int) -> str:
    """`text` in at most `length` characters, without its middle: the ends of a module path identify it."""
    if len(text) <= length:
        return text
    tail = (length - 1) * 3 // 5
    return f"{text[: length - 1 - tail]}…{text[len(text) - tail :]}"


def shortened(text: str, length: int = 2_000) -> str:
    """`text` in at most `length` characters, with an ellipsis where it was cut."""
    return text if len(text) <= length else f"{text[: length - 1].rstrip()}…"


def one_line(text: str, width: int) -> str:
    """`text` on one line of at most `width` columns, with an ellipsis where it was cut."""
    flat = " ".join(clean(text).split())
    return flat if cells(flat) <= width else fitting(flat, width - 1).rstrip() + "…"


def wrap(text: str, width: int, *, indent: str = "", hanging: str = "") -> Iterator[str]:
    """Lines of `text` of at most `width` columns: the first after `indent`, the others after `hanging`.

    A word longer than a line is broken. No line is a command to GitHub Actions, see `clean`.
    """
    return map(clean, _wrapped(text, width, indent, hanging))


def _wrapped(text: str, width: int, indent: str, hanging: str) -> Iterator[str]:
    start = indent
    for paragraph in clean(text).splitlines():
        line = start
        for word in paragraph.split():
            joined = f"{line} {word}" if line.strip() else line + word
            if cells(joined) > width and line.strip():
                yield line
                start, joined = hanging, hanging + word
            while cells(joined) > width:
                head = fitting(joined, width)
                yield head
                start, joined = hanging, hanging + joined[len(head) :]
            line = joined
        if line.strip():
            yield line
            start = hanging


def command_lines(before: str, command: str, width: int) -> Iterator[str]:
    """A command behind `before`, in lines of at most `width` columns that a shell takes as one command.

    A line that goes on ends with a backslash; a word that is longer than a line goes on without indentation.
    """
    try:
        words = shlex.split(clean(command))
    except ValueError:  # a quotation that does not end: it is no command
        yield from wrap(f"{before.lstrip()} {command}", width, indent="  ", hanging="    ")
        return
    line = before
    for word in words:
        quoted = shlex.quote(word)
        if cells(f"{line} {quoted}") <= width - 2:
            line = f"{line} {quoted}"
            continue
        yield f"{line} \\"
        indent = "    "
        while cells(indent + shlex.quote(word)) > width - 2:
            part = next(n for n in range(len(word), 0, -1) if cells(indent + shlex.quote(word[:n])) < width or n == 1)
            yield f"{indent}{shlex.quote(word[:part])}\\"
            word, indent = word[part:], ""
        line = indent + shlex.quote(word)
    yield line
