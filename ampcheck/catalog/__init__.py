"""The declarations of checks that have no file of their own in `ampcheck.checks` yet."""

from __future__ import annotations

from typing import Any

from ampcheck.core.check import SECTIONS, Check


def declared(slug: str, family: str, *page: str, **rest: Any) -> Check:
    """A check from the four texts of its page."""
    return Check(slug, family, "\n\n".join(map(": ".join, zip(SECTIONS, page, strict=True))), **rest)
