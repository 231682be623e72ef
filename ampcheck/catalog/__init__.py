"""What each check means: the text of `ampcheck explain SLUG`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from ampcheck.catalog import autocast, compiled, numerics, search, speed, training
from ampcheck.catalog.page import Explanation
from ampcheck.catalog.verdicts import VERDICTS
from ampcheck.core.errors import UsageError

__all__ = ["EXPLANATIONS", "VERDICTS", "Explanation", "explain"]

_PAGES = (
    *numerics.PAGES[:-1],
    *autocast.PAGES,
    *compiled.PAGES,
    *training.PAGES,
    *search.PAGES,
    *speed.PAGES,
    numerics.PAGES[-1],
)

EXPLANATIONS: Mapping[str, Explanation] = MappingProxyType({page.slug: page for page in _PAGES})


def explain(slug: str) -> Explanation:
    """The page of one check. Raises `UsageError` naming the checks for an unknown slug."""
    if slug not in EXPLANATIONS:
        near = get_close_matches(slug.lower(), EXPLANATIONS, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(f"there is no check {slug!r}{meant}; there are {', '.join(EXPLANATIONS)}")
    return EXPLANATIONS[slug]
