"""A result of the shadowed run, with its companions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Reference:
    """The companions of one result of an eager run: its exact value, with which other runs of the call are compared.

    exact: float64. moved: float32, see `ampcheck.facts.values`. unit: the unit roundoff of the coarsest format
    that the eager run used on the way.
    """

    exact: torch.Tensor
    moved: torch.Tensor
    unit: float


@dataclass(frozen=True, slots=True)
class Result:
    """One result of the shadowed run.

    reference: None for integers, which have no companions. terms: of the longest sum that it was made with, whose order
    is free: float32 shows it, and no format of 16 bits. roundings: to 16 bits in a row, at the most.
    """

    value: torch.Tensor = field(repr=False)
    reference: Reference | None = field(repr=False)
    terms: int = 1
    roundings: int = 8

    @property
    def nbytes(self) -> int:
        """The memory of the value and its companions."""
        known = () if self.reference is None else (self.reference.exact, self.reference.moved)
        return self.value.nbytes + sum(tensor.nbytes for tensor in known)
