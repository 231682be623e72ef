"""Record of the accepted findings that are gone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BaselineStats:
    """A run beside the baseline in the file `subject`. gone: check and subject of each accepted finding that its check
    no longer reports, although it judged the subject."""

    subject: str
    gone: tuple[tuple[str, str], ...] = ()
