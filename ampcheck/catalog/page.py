"""A page of help."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Explanation:
    """A page of help: what a check requires, how it is measured, what usually causes a finding, how to mend it."""

    slug: str
    requires: str
    measured: str
    causes: str
    mend: str
