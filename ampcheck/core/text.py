"""Text from outside, such as a model's name or an error's message, made safe to print."""

from __future__ import annotations

import unicodedata

_BIDI_CONTROLS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def clean(text: str) -> str:
    """`text` with control characters, lone surrogates and bidirectional overrides as escapes such as `\\x1b`.

    Such characters could control a terminal or mislead a reader. Line ends and tabs are not changed.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    hostile = unicodedata.category(character) in ("Cc", "Cs") or character in _BIDI_CONTROLS
    return character.encode("unicode_escape").decode() if hostile and character not in "\n\t" else character
