"""The exact value of a result, with which the results of other runs of the same call are compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ampcheck.core.formats import format_of
from ampcheck.shadow.bounds import Examination, examine
from ampcheck.shadow.companions import roundoff


@dataclass(frozen=True, slots=True)
class Reference:
    """The companions of one result of an eager run.

    exact: float64. moved: float32, see `ampcheck.shadow.companions`. unit: the unit roundoff of the coarsest format
    that the eager run used on the way.
    """

    exact: torch.Tensor
    moved: torch.Tensor
    unit: float

    def examine(self, value: torch.Tensor, *, gradient: bool = False, digits: bool | None = None) -> Examination:
        """Compare the result of another run, such as that of the compiled model, with exact.

        gradient: judge the whole tensor at once. digits: as of `ampcheck.shadow.bounds.examine`. Raises `ValueError`
        for another shape.
        """
        if value.shape != self.exact.shape:
            raise ValueError(f"a result of shape {list(self.exact.shape)} is required; found {list(value.shape)}")
        with torch.no_grad():
            unit = max(self.unit, roundoff(value.dtype))
            form = format_of(torch.float32 if value.is_complex() else value.dtype)
            return examine(value.detach(), self.exact, self.moved, unit, form=form, whole=gradient, digits=digits)
