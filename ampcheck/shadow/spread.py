"""Honest errors of a result that the distance of moved from exact does not show.

It is one sample. A sum of which little is left may be near it by chance, as the gradient of a bias is near the optimum.
And an iteration that draws values to a fixed point forgets how the data moved, but not how its last step was rounded.
"""

from __future__ import annotations

import torch

from ampcheck.core.errors import OP_ERRORS
from ampcheck.facts.values import CompanionStore
from ampcheck.records.results import FLOOR, MOVE
from ampcheck.shadow.bounds import group_dims
from ampcheck.shadow.call import Call
from ampcheck.shadow.norms import relative_error


def widened(call: Call, tensor: torch.Tensor, store: CompanionStore) -> bool:
    """Let moved go as far from exact as honest errors of the inputs may take a result. Returns whether it went further.

    In the backward pass sums add up gradients, whose roundings are independent. In an update iterations refine
    what they are given; elsewhere a product may be the first to show digits that were lost before it.
    """
    if call.written or tensor.is_complex():
        return False
    exact, moved = store.exact(tensor), store.moved(tensor)
    apart = (moved - exact).abs()
    further = _of_terms(call, store) if call.where.phase == "backward" and call.traits.sums else None
    if call.where.phase == "update" and call.traits.factors == (0, 1):
        further = _of_factors(call, tensor, store)
    if further is None or further.shape != exact.shape:
        return False
    grows = further.isfinite() & (further > apart)
    if not bool(grows.any()):
        return False
    store.of(tensor).own()
    moved = store.moved(tensor)
    sign = torch.where(moved < exact, -1.0, 1.0)
    moved.copy_(torch.where(grows, exact + sign * further, moved.double()))
    return True


def _of_terms(call: Call, store: CompanionStore) -> torch.Tensor | None:
    """The root of the sum of squares of what the terms of a sum may be off, each rounded by itself."""
    terms = call.inputs[0]
    exact = store.exact(terms)
    if exact.is_complex():
        return None
    off = (store.moved(terms) - exact).square() + (MOVE * exact).square()
    try:
        total = call.op(off, *call.args[1:], **{k: v for k, v in call.kwargs.items() if k != "dtype"})
    except OP_ERRORS:
        return None
    count = terms.numel() / max(1, total.numel())
    root: torch.Tensor = (total / (count if call.name == "mean" else 1.0)).sqrt()
    return root


def _of_factors(call: Call, tensor: torch.Tensor, store: CompanionStore) -> torch.Tensor | None:
    """The error of a product that is no worse than its factors: their relative errors add up, and it loses no digit."""
    if len(call.inputs) != 2 or call.traits.foreach:
        return None
    exact, unit = store.exact(tensor), store.of(tensor).unit
    error, dims = tensor.to(exact.dtype) - exact, group_dims(tensor.shape)
    size, off = (torch.linalg.vector_norm(values, dim=dims) for values in (exact, error))
    honest = sum(relative_error(factor, store) for factor in call.inputs) + FLOOR * unit
    return error.abs() * (MOVE / unit) if bool((off <= honest * size).all()) else None
