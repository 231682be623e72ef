"""A run that is interrupted, saved and loaded beside one that is not."""

from __future__ import annotations

from dataclasses import dataclass

from ampcheck.records.protocol import Event

UNIT = "relative difference"

NOT_DECLARED = (
    "the mapping declares no way to save and load: add 'save' (a function without arguments that returns a checkpoint) "
    "and 'load' (a function of that checkpoint)"
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A part in which two runs differ, to the bit.

    what: `weights`, `optimizer state`, `buffers`, `copies of weights`, `scaler`, `scheduler`, `optimizer settings` or
    `losses`. names: which of them. detail: one of them, with both values. size: the largest relative difference, in
    the Euclidean norm; infinite where one is missing.
    """

    what: str
    names: tuple[str, ...]
    detail: str = ""
    size: float = 0.0


@dataclass(frozen=True, slots=True)
class ResumeStats:
    """An uninterrupted run of 2 * steps steps compared with one that was interrupted in the middle.

    skipped: why nothing was compared.
    raised: what `save`, `load` or the first steps after them raised.
    forgotten: what differs right after the checkpoint was loaded from what was saved.
    differences: what differs in the end, although random numbers and accumulated gradients were restored for the
    loop. unaided: the same where they were not; empty where that makes no difference.
    drew: whether the uninterrupted run draws random numbers. accumulating: whether gradients were not zero at the
    interruption.
    """

    subject: str
    steps: int
    skipped: str = ""
    raised: str = ""
    forgotten: tuple[Difference, ...] = ()
    differences: tuple[Difference, ...] = ()
    unaided: tuple[Difference, ...] = ()
    drew: bool = False
    accumulating: bool = False


@dataclass(frozen=True, slots=True)
class SavedStates:
    """The calls of a loop that save and load states, and those of its scalers."""

    subject: str
    events: tuple[Event, ...]
