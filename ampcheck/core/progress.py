"""The progress callback of long runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with the name of the current stage, the number of finished stages, and the number of all stages."""


def silent(stage: str, done: int, total: int) -> None:
    """No-op callback."""
