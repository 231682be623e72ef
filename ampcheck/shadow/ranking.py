"""Ops whose rounding hides the ranking of elements, though their inputs determine it.

A ranking sees differences only: what all elements have in common (the offset of a score, the group in a sort key) takes
digits and ranks nothing. The op is at fault by the same rule as elsewhere, applied to values that are centred along a
dimension: an input is within its bound, and the result does not keep it. The cast of an input, from a wider value that
the run has at hand, is part of the op: bias and scores may hide the ranking together where neither does alone.
"""

from __future__ import annotations

import torch

from ampcheck.facts.memory import roundoff
from ampcheck.facts.values import CompanionStore
from ampcheck.records.results import SLACK
from ampcheck.shadow.bounds import Look, floor_of
from ampcheck.shadow.call import Call
from ampcheck.shadow.cause import alone, mended_side

_HIDDEN = 0.25
"""The error of a result, relative to what ranks its elements, from which it hides them."""

_CLEAR = 0.05
"""The same from which it may turn selections by a clear part of it, see `decisions`."""

_GROWS = 8.0
"""The factor by which the op that hides a ranking makes the error larger."""

_OFFSET = 2.0
"""Values of one magnitude: none is larger than another by this factor."""


def hides_ranking(
    call: Call, tensor: torch.Tensor, store: CompanionStore, magnitudes: Look, *, accumulates: bool
) -> bool:
    """Return whether the rounding of this op hides the ranking of the elements of a 16-bit result along some dimension.

    accumulates: it is a sum over many ops, each of which adds to the error.
    """
    adds = call.weights and not (call.written or call.traits.foreach)
    if adds and tensor.numel() > 1 and _absorbs(call, tensor, store):
        return True
    if not 0.0 < magnitudes.largest <= _OFFSET * magnitudes.smallest or call.moves:
        return False
    exact, hidden = store.exact(tensor), _hidden(tensor, store)
    if accumulates or not hidden:
        return bool(hidden)
    bound = _honest(tensor, store)
    own = mended_side(store, [store.of(t) for t in call.inputs if _is_rounded_once(t, store)])
    of_inputs = [result - exact for result in alone(call, tensor, store, own)]
    return any(
        _width(values, dim) <= min(bound * width, error / _GROWS)
        for values in of_inputs
        for dim, (width, error) in hidden.items()
    )


def _hidden(tensor: torch.Tensor, store: CompanionStore) -> dict[int, tuple[float, float]]:
    """By dimension along which errors hide the ranking: how far exact values lie apart, and errors."""
    exact = store.exact(tensor)
    widths = [(_width(exact, dim), _width(tensor - exact, dim)) for dim in range(tensor.dim())]
    return {dim: (width, error) for dim, (width, error) in enumerate(widths) if 0 < _CLEAR * width < error}


def _absorbs(call: Call, tensor: torch.Tensor, store: CompanionStore) -> bool:
    """Return whether the rounding of a sum hides a term that is known to more digits, other than where a mask is to."""
    if not _hides_a_term(call, store, float(tensor.abs().amax()) * roundoff(tensor.dtype)):
        return False
    kept = tensor.where(~_masked_out(call, tensor), 0.0)
    return _hides_a_term(call, store, float(kept.abs().amax()) * roundoff(tensor.dtype))


def _hides_a_term(call: Call, store: CompanionStore, coarse: float) -> bool:
    for term in call.inputs:
        if term.numel() <= 1 or not float(term.abs().amax()) * _HIDDEN <= coarse:
            continue
        exact = store.exact(term)
        error, bound = term - exact, _honest(term, store)
        for dim in range(term.dim()):
            width = _width(exact, dim)
            if 0 < _HIDDEN * width <= coarse and _width(error, dim) <= min(bound * width, coarse / _GROWS):
                return True
    return False


def _masked_out(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a sum that a mask, which is zero elsewhere, puts last: their order means nothing."""
    masked = torch.zeros_like(tensor, dtype=torch.bool)
    for term, sign in zip(call.args, call.weights, strict=False):
        if isinstance(term, torch.Tensor) and term.numel() > 1:
            lowest = (sign * term).amin()
            out = sign * term == lowest
            if bool(lowest < 0) and bool(out.logical_or(term == 0).all()) and not bool(out.all()):
                masked |= out
    return masked


def _is_rounded_once(tensor: torch.Tensor, store: CompanionStore) -> bool:
    """Return whether a value of 16 bits is nothing but its exact one, rounded, such as the cast of a bias before this
    op."""
    return tensor.dtype.itemsize <= 2 and torch.equal(store.exact(tensor).to(tensor.dtype), tensor)


def _honest(tensor: torch.Tensor, store: CompanionStore) -> float:
    companions = store.of(tensor)
    return SLACK * floor_of(companions.depth) * companions.unit


def _width(values: torch.Tensor, dim: int) -> float:
    """Return how far values lie apart along a dimension: the root of their mean variance."""
    return float(values.var(dim, correction=0).mean().sqrt())
