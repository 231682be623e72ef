"""Compare what another run of the same call gave, such as compiled code, with what the shadowed run gave.

Not with the values of the shadowed run but with its exact ones: other roundings than those of eager mode are no fault.
What is beyond its bound in eager mode as well is a fault of eager mode, unless the other run is worse by far.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch

from ampcheck.core.formats import format_of
from ampcheck.shadow.bounds import FLOOR, SLACK, UNKNOWABLE, Examination
from ampcheck.shadow.companions import MOVE, has_companions, roundoff
from ampcheck.shadow.mode import Shadow
from ampcheck.shadow.reference import Reference

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Result:
    """One result of the shadowed run. reference: None for whole numbers, which have no companions."""

    value: torch.Tensor = field(repr=False)
    reference: Reference | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class ResultError(Generic[Key]):
    """How far another run lies from the exact value of one result.

    eager, other: both runs, examined alike. lost: elements that are inf or NaN, or not, unlike those of exact and of
    eager mode. nan: elements that are NaN in exact and in the other run alike. share: the norm of the error over that
    of all results together. apart: the norm of the difference of the two runs over that of eager mode; of integers, the
    share of elements that differ. absent: the other run gave no such result, or one of another shape. beyond: the other
    run is at fault.
    """

    key: Key
    dtype: str
    numel: int
    eager: Examination
    other: Examination
    lost: int = 0
    nan: int = 0
    share: float = 0.0
    apart: float = 0.0
    absent: bool = False
    beyond: bool = False

    @property
    def limit(self) -> float:
        """The largest relative error that the other run may have."""
        return self.other.limit or max(self.other.spread * SLACK, 0.0)

    @property
    def unknowable(self) -> bool:
        """Whether the data determine nothing of the result: a gradient that is zero by mathematics."""
        return not self.other.flagged and self.eager.spread > UNKNOWABLE


def result_of(shadow: Shadow, tensor: torch.Tensor) -> Result:
    """Copies of a tensor of the shadowed run and of its companions, for as long as its values are those of now."""
    reference = shadow.reference(tensor) if has_companions(tensor) else None
    return Result(tensor.detach().clone(), reference)


def compare_results(
    results: Mapping[Key, Result],
    values: Mapping[Key, torch.Tensor],
    *,
    gradients: bool = False,
    digits: bool | None = None,
) -> tuple[ResultError[Key], ...]:
    """Compare the values of another run with the results of the shadowed run.

    gradients: they are all gradients of one step: each is judged as a whole, and what is small beside all of them
    together is no error. digits: as of `ampcheck.shadow.bounds.examine`; True for compiled code in float32.
    """
    raise NotImplementedError
