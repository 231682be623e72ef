"""Counts and lists in messages."""

from __future__ import annotations

from collections.abc import Collection


def counted(count: int, noun: str) -> str:
    """`no graphs`, `1 graph`, `2 graphs`, `3 launches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{f'{count:,}' if count else 'no'} {noun if count == 1 else plural}"


def listed(items: Collection[str], limit: int = 3) -> str:
    """The first `limit` of them, and how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(list(items)[:limit]) + more
