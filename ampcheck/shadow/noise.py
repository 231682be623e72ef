"""Values that are nothing but rounding: the gradient of a bias before a normalisation, the mean of a centred row.

The data determine nothing of them, and their bounds excuse any error. What is made of them is as little determined: the
state of an optimizer, which such gradients fill, and the updates of weights that follow from it.
"""

from __future__ import annotations

import torch

from ampcheck.shadow.companions import MOVE, Companions, view_of


def carry_noise(value: torch.Tensor, exact: torch.Tensor, moved: torch.Tensor, companions: Companions) -> None:
    """Let moved lie as far from exact as the value does, where it is nearer: so that ops on the value know its error.

    Moved is exact but for the data that moved, while the value is made of roundings, which may be larger by far.
    """
    if value.is_complex():
        return
    error = (value.double() - exact) * (MOVE / companions.unit)
    wider = (error.abs() > (moved.double() - exact).abs()) & error.isfinite()
    companions.own()
    target = view_of(value, companions.moved.values)
    target.copy_(torch.where(wider, exact + error, moved.double()))
