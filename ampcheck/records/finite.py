"""Losses and weights of a training loop that may be infinite or NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from ampcheck.core.run import Where

LAST = 3
"""So many steps at the end with a loss that is not finite are no passing overflow any more."""


@dataclass(frozen=True, slots=True)
class FiniteStats:
    """losses: what the steps returned, from 0 on. before, after: parameters with infinite or NaN elements, by name, at
    the start and after the last step. weights: how many parameters were looked at. place: the op in which step
    `overflowed` first makes an infinity or a NaN; None where that is not known. undefined: the step in which
    float64 makes one there as well. steps: after how many the weights were looked at. since: the first with a gradient
    that ruined a weight; applied: the first with an infinite or NaN gradient by parameter that stayed finite. counted:
    in which steps, "" for all.
    """

    subject: str
    losses: tuple[float, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    weights: int = 0
    place: Where | None = None
    undefined: int | None = None
    steps: int = 0
    since: int | None = None
    applied: Mapping[str, int] = field(default_factory=dict)
    counted: str = ""

    @property
    def trailing(self) -> int:
        """Number of losses at the end that are infinite or NaN."""
        return sum(1 for _ in takewhile(lambda loss: not math.isfinite(loss), reversed(self.losses)))

    @property
    def overflowed(self) -> int | None:
        """The first step from which on no loss is finite; None where that is a passing overflow or there is none.

        One that ruins a weight does not pass.
        """
        lost, ruined = self.trailing, bool(self.after and not self.before)
        return len(self.losses) - lost if lost and (lost >= LAST or lost == len(self.losses) or ruined) else None
