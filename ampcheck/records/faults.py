"""Faults: places of the run where a value left its bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ampcheck.core.run import Where
from ampcheck.records.results import Examination

Key: TypeAlias = tuple[str, Where, str]
"""Of a fault: its kind, place and dtype."""

OVERFLOW = "overflow"
MASK = "mask"
FLUSH = "flush"
ZERO = "silent-zero"
COLLISION = "collision"
WRAP = "integers that wrap around"
ROUNDING = "rounding"
CANCELLATION = "cancellation"
DRIFT = "drift"
CONSTANT = "constant of the format"
DECISION = "decision"
BOUND = "bound that decides"

ENDS = " has the integers from"
"""In the note of a collision that follows from the range of the integers to which values are converted."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An op that is at fault: its inputs were within their bounds, and a result is not.

    kind: one of the constants of this module. error, spread, limit: relative to the norm of exact, of the worst group.
    impact: relative to the whole tensor. amax_in, amax_out, exact_amax: largest finite magnitudes of the inputs, the
    result and its exact companion. count: how often it happened; elements: lost, flushed, collided, decided otherwise,
    of `numel` that were judged, both in all these times together. index: the number of the op in the run. reaches: what
    the damage is left in, with its share of the whole.
    """

    kind: str
    where: Where
    dtype: str
    examination: Examination
    shape: tuple[int, ...]
    amax_in: float = 0.0
    amax_out: float = 0.0
    exact_amax: float = 0.0
    elements: int = 0
    numel: int = 0
    count: int = 1
    index: int = 0
    note: str = ""
    reaches: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """Equal for the same kind of fault at the same place."""
        return self.kind, self.where, self.dtype

    def __add__(self, other: Fault) -> Fault:
        """The two as one place, with the evidence of the worse."""
        worse = max(self, other, key=lambda fault: fault.examination.error)
        return replace(
            worse,
            count=self.count + other.count,
            elements=self.elements + other.elements,
            numel=self.numel + other.numel,
            index=min(self.index, other.index),
        )

    def __str__(self) -> str:
        seen = self.examination
        return (
            f"{self.kind:<13}{self.where}  {self.dtype}  error {seen.error:.2e}, limit {seen.limit:.2e}, spread "
            f"{seen.spread:.2e}, {seen.flagged} of {seen.groups} groups, lost {seen.lost}, x{self.count} "
            f"{list(self.shape)} in {self.amax_in:.3g} out {self.amax_out:.3g} exact {self.exact_amax:.3g} {self.note}"
        )
