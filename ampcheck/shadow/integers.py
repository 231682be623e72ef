"""Whole numbers in floating tensors: positions, ids and counters.

A format with p bits of significand holds every integer up to 2**p; beyond, neighbours round to the same value. Two
different integers that become equal are a collision: two positions, rows or timestamps are then the same for good.
Measurements (an image, audio, counts that are averaged) may collide without harm; what is counted through without a gap
is a position or an id, and so is what is compared or indexed with.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ampcheck.facts.memory import roundoff
from ampcheck.facts.values import CompanionStore
from ampcheck.records.faults import COLLISION, Fault
from ampcheck.records.results import Examination
from ampcheck.shadow.call import Call
from ampcheck.shadow.cause import fault_at, largest_of

IDENTITIES = ("order", "equality", "identity", "bin")
"""Decisions by which code compares numbers, or looks them up."""

CONSECUTIVE = "positions or ids, counted through without a gap"
"""The note of a fault of such numbers."""

_LARGEST = 2.0**53
"""Beyond it not even float64 holds every integer; a mask such as finfo.min is no count."""

_COUNTED = 1 << 22
"""Elements among which collisions are counted, at the most."""


def collisions_in(call: Call, tensor: torch.Tensor, store: CompanionStore) -> Fault | None:
    """The numbers that became equal in a result of whole numbers, as a fault; None without any."""
    if not 1 < tensor.numel() <= _COUNTED:
        return None
    exact = store.exact(tensor)
    largest = float(exact.abs().amax())
    if not 0.5 / roundoff(tensor.dtype) <= largest < _LARGEST:
        return None
    numbers: torch.Tensor = torch.unique(exact)
    collided = numbers.numel() - torch.unique(tensor).numel()
    if collided <= 0:
        return None
    consecutive = numbers.numel() == float(numbers.amax() - numbers.amin()) + 1
    fault = fault_at(COLLISION, call, tensor, Examination(tensor.numel()))
    fault = replace(fault, amax_in=largest, amax_out=largest_of(tensor), exact_amax=largest, elements=collided)
    return replace(fault, note=CONSECUTIVE) if consecutive else fault
