"""Source files as findings name them."""

from __future__ import annotations

from linecache import checkcache, getlines

from ampcheck.core.run import Where


def lines_of(file: str) -> list[str]:
    """The lines of a source file as it is now; none where it cannot be read."""
    checkcache(file)
    return getlines(file)


def code_at(where: Where) -> str:
    """The source line at a location, without indentation; empty where it is not known."""
    lines = lines_of(where.file) if where.file and where.line is not None else []
    return lines[where.line - 1].strip() if where.line is not None and 0 < where.line <= len(lines) else ""
