"""History of the values of a storage: the types in which its companions keep it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from ampcheck.core.run import Where
from ampcheck.records.faults import Key as Key

Part: TypeAlias = tuple[int, torch.Size, tuple[int, ...]]
"""A part of a storage: offset, shape and strides."""

Past: TypeAlias = tuple[int, frozenset[Where]]
"""Number of writes in a row that built on the previous value, and the ops that made it."""


class Sum(NamedTuple):
    """A name of values, which copies of them share, and the names of what they are a sum of."""

    name: int
    terms: frozenset[int]


@dataclass(frozen=True, slots=True)
class Step:
    """A value on the way of an error: the op that made it, its error, and a bad value that it was made of."""

    where: Where
    error: float
    before: Step | None = None
    length: int = 1


def extended(where: Where, error: float, before: Step | None) -> Step:
    """A step after another. The way of an error through a long loop keeps its last steps."""
    if before is not None and before.length >= 64:
        before = None
    return Step(where, error, before, 1 if before is None else before.length + 1)
