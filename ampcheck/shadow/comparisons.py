"""Code that measures the error of its own run: a result in 16 bits less the same in a wider format.

In float64 both are equal and their difference is zero, or what float64 itself rounds. What the run has there is its own
error, which no data determine: it has no size of its own, and is as large as the honest errors of the operands. So is
all that is made of it: a norm, a mean of squares, a decision whether it is small enough.
"""

from __future__ import annotations

import math

import torch

from ampcheck.facts.memory import finite, has_companions
from ampcheck.facts.values import Companions, CompanionStore
from ampcheck.records.results import MOVE, SLACK
from ampcheck.shadow.bounds import floor_of
from ampcheck.shadow.call import Call, item_of, leaves
from ampcheck.shadow.decisions import doubt
from ampcheck.shadow.increments import take_up
from ampcheck.shadow.suspects import ERROR, TAKEN

ZERO = 2.0**-30
"""A part of the operands' errors that is nothing: what float64 rounds."""

_UNDETERMINED_SPREAD = 4.0
"""The spread of a value, relative to it, of which the data are to determine nothing."""


def own_error(call: Call, tensor: torch.Tensor, store: CompanionStore) -> str:
    """The sort of suspect that a result is, if it is off by roundings that it measures; they move what is made of it.

    Empty for any other result.
    """
    if measures_error(call, tensor, store):
        undetermine(tensor, store, store.of(tensor))
        return ERROR
    return TAKEN if take_up(call, tensor, store) else ""


def measures_error(call: Call, tensor: torch.Tensor, store: CompanionStore) -> bool:
    """Return whether a result is zero in float64, and in the run an error of the size that its operands have.

    What is made of such an error has no other size.
    """
    exact = store.exact(tensor)
    error = float(torch.linalg.vector_norm(tensor.to(exact.dtype) - exact))
    if call.traits.random or not float(torch.linalg.vector_norm(exact)) <= ZERO * error < torch.inf:
        return False
    number = next((i for i, result in enumerate(call.results or call.written) if result is tensor), 0)
    honest = 0.0
    for operand in (t for value in call.args for t in leaves(item_of(value, number)) if has_companions(t)):
        if any(operand is t for t in call.written):
            continue  # of which nothing is left
        companions = store.of(operand)
        if ERROR in companions.suspects:
            return True
        share = doubt(operand, store, max(companions.unit, store.of(tensor).unit), floor_of(companions.depth))
        honest = math.hypot(honest, share * float(torch.linalg.vector_norm(store.exact(operand))))
    return error <= SLACK * honest


def undetermine(tensor: torch.Tensor, store: CompanionStore, companions: Companions) -> None:
    """Let moved go where the run went: the data determine nothing of a value that is its error."""
    companions.own()
    exact, share = store.exact(tensor), _UNDETERMINED_SPREAD * MOVE / companions.unit
    store.moved(tensor).copy_(exact + (tensor.to(exact.dtype) - exact) * share)


def determine(call: Call, tensor: torch.Tensor, store: CompanionStore, companions: Companions) -> bool:
    """Let what an error is an exponent of, such as a ratio of probabilities, have a size again: float64 gives 1."""
    if not call.traits.lifts:
        return False
    companions.own()
    store.moved(tensor).copy_(store.exact(tensor))
    return True


def restarts(tensor: torch.Tensor, store: CompanionStore, companions: Companions) -> bool:
    """Let what is not finite in float64 alone, where the error is zero, be as in the run, and undetermined: the slope
    of a norm or a root at zero."""
    if not bool(finite(tensor).all()) or bool(store.exact(tensor).isfinite().all()):
        return False
    store.lift(tensor)
    store.moved(tensor).mul_(1 + _UNDETERMINED_SPREAD * MOVE / companions.unit)
    return True
