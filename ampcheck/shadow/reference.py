"""The exact value of a result, with which the results of other runs of the same call are compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Reference:
    """The companions of one result of an eager run.

    exact: float64. moved: float32, see `ampcheck.shadow.companions`. unit: the unit roundoff of the coarsest format
    that the eager run used on the way.
    """

    exact: torch.Tensor
    moved: torch.Tensor
    unit: float
