"""Whole numbers in floating tensors: positions, ids and counters.

A format with p bits of significand holds every integer up to 2**p; beyond, neighbours round to the same value. Two
different integers that become equal are a collision: two positions, rows or timestamps are then the same for good.
Measurements (an image, audio, counts that are averaged) may collide without harm; what is counted through without a gap
is a position or an id, and so is what is compared or indexed with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ampcheck.core.run import Where
from ampcheck.shadow.bounds import Examination
from ampcheck.shadow.call import Call
from ampcheck.shadow.cause import largest_of
from ampcheck.shadow.companions import CompanionStore, roundoff
from ampcheck.shadow.faults import COLLISION, Fault
from ampcheck.shadow.memory import dtype_name

IDENTITIES = frozenset(
    "eq ne lt le gt ge unique _unique _unique2 unique_dim unique_consecutive isin searchsorted bucketize".split()
)
"""Ops that compare numbers, or look them up."""

CONSECUTIVE = "positions or ids, counted through without a gap"
"""The note of a fault of such numbers."""

_LARGEST = 2.0**53
"""Beyond it not even float64 holds every integer; a mask such as finfo.min is no count."""

_COUNTED = 1 << 22
"""Elements among which collisions are counted, at the most."""


@dataclass(frozen=True, slots=True)
class Collisions:
    """How many fewer different numbers are left. consecutive: the exact numbers are counted through without a gap."""

    collided: int
    largest: float
    consecutive: bool

    def fault(self, tensor: torch.Tensor, where: Where, index: int) -> Fault:
        """The fault of a result that they are in. index: of the op in the run."""
        return Fault(
            COLLISION, where, dtype_name(tensor.dtype), Examination(tensor.numel()), tuple(tensor.shape), self.largest,
            largest_of(tensor), self.largest, self.collided, index=index, note=CONSECUTIVE if self.consecutive else "",
        )  # fmt: skip


def examine_integers(call: Call, tensor: torch.Tensor, store: CompanionStore) -> Collisions | None:
    """The collisions in a result of whole numbers; None without any."""
    if not 1 < tensor.numel() <= _COUNTED:
        return None
    exact = store.exact(tensor)
    largest = float(exact.abs().amax())
    if not 0.5 / roundoff(tensor.dtype) <= largest < _LARGEST:
        return None
    numbers = _different(exact)
    collided = numbers.numel() - _different(tensor).numel()
    if collided <= 0:
        return None
    span = float(numbers.amax() - numbers.amin()) + 1
    return Collisions(collided, largest, consecutive=numbers.numel() == span)


def _different(values: torch.Tensor) -> torch.Tensor:
    numbers: torch.Tensor = torch.unique(values)
    return numbers
