"""How far a long run is: what those who work tell, and whoever shows it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]
"""Told what is done now, how many parts are done, and of how many."""


def silent(stage: str, done: int, total: int) -> None:
    """Tell nobody."""
