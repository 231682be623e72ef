"""Patterns of module paths: `*` is one part or a piece of one, `**` any number of parts."""

from __future__ import annotations

import re
from functools import lru_cache


def matches(pattern: str, path: str) -> bool:
    """Return whether `pattern` matches the whole of `path`: `layers.*.norm`, `**.norm*`, `""` for the root."""
    if not path:  # the root has no parts
        return set(pattern.split(".")) <= {"", "**"}
    return _compiled(pattern).fullmatch(path) is not None


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    pieces = {"**.": r"(?:[^.]+\.)*", ".**": r"(?:\..+)?", "**": r".*", "*": r"[^.]*", "?": r"[^.]"}
    parts = re.split(r"(\*\*\.|\.\*\*$|\*\*|\*|\?)", re.sub(r"(\.\*\*)+$", ".**", pattern))
    return re.compile("".join(pieces.get(part, re.escape(part)) for part in parts), re.DOTALL)
