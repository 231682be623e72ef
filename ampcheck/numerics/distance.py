"""The one measure of distance: relative, in the Euclidean norm, over what is finite on both sides."""

from __future__ import annotations

import math

import torch

from ampcheck.numerics.arms import KINDS, Outcome, name_of


def relative_error(tensor: torch.Tensor, wide: torch.Tensor) -> float:
    """Norm of the difference over the norm of `wide` (float64), over the elements that are finite in both.

    Infinite where the shapes differ, and where something stands beside an exact zero.
    """
    if tensor.shape != wide.shape:
        return math.inf
    both = tensor.isfinite() & wide.isfinite()
    distance = norm(torch.where(both, tensor.double() - wide, 0.0))
    size = norm(torch.where(both, wide, 0.0))
    return distance / size if size else (math.inf if distance else 0.0)


def norm(tensor: torch.Tensor) -> float:
    """The Euclidean norm, in float64."""
    return float(torch.linalg.vector_norm(tensor.double()))


def errors_of(outcome: Outcome, reference: Outcome) -> dict[tuple[str, str], float]:
    """The relative error of every output, module output and gradient, by kind and name."""
    found = {}
    for kind, get in KINDS:
        twins = get(reference)
        for key, tensor in get(outcome).items():
            if key in twins:
                found[kind, name_of(key)] = relative_error(tensor, twins[key].double())
    return found
