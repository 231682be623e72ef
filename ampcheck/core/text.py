"""Text that is safe to print, and counts and lists in messages."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TypeGuard

_COMMAND = re.compile(r"^(\s*)::", re.MULTILINE)

_BIDI_CONTROLS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def clean(text: str) -> str:
    """`text` with control characters, lone surrogates and bidirectional overrides as escapes such as `\\x1b`.

    Such characters could control a terminal or mislead a reader. Line ends and tabs are not changed. The first colon of
    a line that begins with `::`, which a job of GitHub Actions would obey, becomes the sign of a ratio.
    """
    if "::" in text:
        text = _COMMAND.sub("\\1\u2236:", text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    hostile = unicodedata.category(character) in ("Cc", "Cs") or character in _BIDI_CONTROLS
    return character.encode("unicode_escape").decode() if hostile and character not in "\n\t" else character


def counted(count: int, plural: str, zero: str = "0") -> str:
    """`1 loss`, `2 losses`: a count and what it counts, whose first plural word is the noun (`sets of modules`)."""
    return f"{f'{count:,}' if count else zero} {singular(plural) if count == 1 else plural}"


def cannot_run(lack: str) -> str:
    """The reason of every check that is skipped since the machine lacks something; lack: what."""
    return f"this machine cannot run it: {lack}"


def listed(items: Iterable[str], limit: int = 5) -> str:
    """`a, b and 3 more`: the first `limit` items, and how many are left out."""
    items = list(items)
    more = f" and {len(items) - limit:,} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`did you mean overflow?`: the name nearest to a mistyped one; empty where none is near."""
    by_lower = {known.lower(): known for known in names}
    near = get_close_matches(name.lower(), by_lower, 1)
    return f"did you mean {by_lower[near[0]]}?" if near else ""


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is an int or a float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def singular(plural: str) -> str:
    """The singular of a noun, possibly with words after it."""
    words = plural.split(" ")
    for index, word in enumerate(words):
        if word.endswith("s") and not word.endswith("ss") and word != "series":
            words[index] = word[:-2] if word.endswith(("sses", "nches", "tches")) else word[:-1]
            break
    return " ".join(words)


def cells(text: str) -> int:
    """Return how many columns of a terminal `text` needs at most."""
    return len(text) if text.isascii() else sum(_cells_of(character) for character in text)


def _cells_of(character: str) -> int:
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fitting(text: str, width: int) -> str:
    """The start of `text` that fits into `width` columns."""
    used = 0
    for index, character in enumerate(text):
        used += _cells_of(character)
        if used > width:
            return text[:index]
    return text


def percent(share: float) -> str:
    """A share as text, in percent."""
    return f"{100 * share:.3g} %"


def at_scale(scale: float) -> str:
    """The loss scale that gradients were computed at; 1 is what they have without any."""
    return "without a loss scale" if scale == 1 else f"at loss scale {scale:g}"
