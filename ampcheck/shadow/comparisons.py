"""Code that measures the error of its own run: a result in 16 bits less the same in a wider format.

In float64 both are equal and their difference is zero, or what float64 itself rounds. What the run has there is its own
error, which no data determine: it has no size of its own, and is as large as the honest errors of the operands. So is
all that is made of it: a norm, a mean of squares, a decision whether it is small enough.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from ampcheck.core.errors import OP_ERRORS
from ampcheck.shadow.bounds import SLACK, floor_of
from ampcheck.shadow.call import Call, Side, floating_values, results_of
from ampcheck.shadow.companions import MOVE, Companions, CompanionStore
from ampcheck.shadow.decisions import doubt
from ampcheck.shadow.increments import take_up
from ampcheck.shadow.memory import finite
from ampcheck.shadow.suspects import ERROR, TAKEN

ZERO = 2.0**-30
"""A part of the operands' errors that is nothing: what float64 rounds."""

EXPONENTIALS = frozenset("exp exp2 exp_ exp2_".split())
"""Ops that make a ratio, which data determine, of the difference of logarithms."""

_FAR = 4.0
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
    """Whether a result is zero in float64, and in the run an error of the size that its operands have.

    They are equal in float64, and one was rounded more often than the other; or one is such an error itself. Or the
    result does not depend on them, as a value less the mean of it alone.
    """
    exact = store.exact(tensor)
    error = float(torch.linalg.vector_norm(tensor.to(exact.dtype) - exact))
    size = float(torch.linalg.vector_norm(exact))
    if call.schema.random or not size <= ZERO * error < torch.inf:
        return False
    if call.name.startswith("_foreach_"):
        call = _one_of(call, tensor)
    if not call.before:
        return False
    written = {id(t) for t in call.written}  # of which nothing is left
    errors = {id(t) for t in call.inputs if bool(t.any()) and not bool(store.exact(t).any())}
    errors |= {
        id(t)
        for t, companions in zip(call.inputs, call.before, strict=True)
        if {ERROR, TAKEN} & companions.suspects.keys()
    }
    errors -= written
    unit, floor = max(companions.unit for companions in call.before), floor_of(max(call.depths))
    honest = largest = 0.0
    for operand in call.inputs:
        if not operand.numel() or id(operand) in written:
            continue
        side = _Perturbed(store, operand, doubt(operand, store, unit, floor), errors)
        if (moved := _moved_by(call, tensor, side)) is None:
            return False
        honest = math.hypot(honest, moved)
        largest = max(largest, float(torch.linalg.vector_norm(operand.to(exact.dtype))))
    if honest <= ZERO * error:
        return not call.written and error <= SLACK * unit * largest
    return (bool(errors) or len(set(call.depths)) > 1) and size <= ZERO * honest and error <= SLACK * honest


def _moved_by(call: Call, tensor: torch.Tensor, side: _Perturbed) -> float | None:
    """What an honest error of one operand changes in a result, a norm; None where the op does not run so."""
    op, results = call.op, call.results
    if call.name.startswith("_foreach_") and call.written:  # an op that writes lists returns nothing
        op, results = getattr(getattr(torch.ops.aten, call.name.removesuffix("_")), op._overloadname), [*call.written]
    number = next((i for i, result in enumerate(results) if result is tensor), None)
    if number is None:  # running statistics of a norm, which are no result of it
        return None
    try:
        moved = results_of(side.run(call, op))[number]
        side.share = 0.0
        still = results_of(side.run(call, op))[number]
    except OP_ERRORS:
        return None
    if moved is None or still is None or moved.shape != tensor.shape:
        return None
    return float(torch.linalg.vector_norm(moved - still))


def _one_of(call: Call, tensor: torch.Tensor) -> Call:
    """An op on lists, of which it takes the items of one result: the others have no part in it."""
    number = next((i for i, result in enumerate(call.results or call.written) if result is tensor), 0)

    def item(value: Any) -> Any:
        return value[number : number + 1] if isinstance(value, (list, tuple)) and number < len(value) else value

    args, kwargs = tuple(map(item, call.args)), {name: item(value) for name, value in call.kwargs.items()}
    kept = {id(t) for t in floating_values((*args, *kwargs.values()))}
    pairs = [(t, companions) for t, companions in zip(call.inputs, call.before, strict=True) if id(t) in kept]
    before = [companions for _, companions in pairs]
    return replace(
        call, args=args, kwargs=kwargs, inputs=[t for t, _ in pairs], before=before,
        depths=tuple(c.depth for c in before), results=item(call.results), written=item(call.written),
        out=item(call.out),
    )  # fmt: skip


def undetermine(tensor: torch.Tensor, store: CompanionStore, companions: Companions) -> None:
    """Let moved go where the run went: the data determine nothing of a value that is its error."""
    companions.own()
    exact, share = store.exact(tensor), _FAR * MOVE / companions.unit
    store.moved(tensor).copy_(exact + (tensor.to(exact.dtype) - exact) * share)


def restarts(tensor: torch.Tensor, store: CompanionStore, companions: Companions) -> bool:
    """Let a value that is not finite in float64 alone, where the error is zero, be that of the run, undetermined."""
    if not bool(finite(tensor).all()) or bool(store.exact(tensor).isfinite().all()):
        return False
    store.lift(tensor)
    store.moved(tensor).mul_(1 + _FAR * MOVE / companions.unit)
    return True


class _Perturbed(Side):
    """The exact inputs of one op, elements of one of them moved by a part of their size with signs at random.

    Inputs that are errors of the run are nothing in exact: their own values stand for them, and move them.
    """

    def __init__(self, store: CompanionStore, operand: torch.Tensor, share: float, errors: Collection[int]) -> None:
        super().__init__(store, "exact")
        self.share, self._operand, self._errors = share, operand, errors

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        exact, is_error = self.store.exact(tensor), id(tensor) in self._errors
        if tensor is not self._operand:
            return self.convert(tensor) if is_error else exact.clone()  # the op may write it
        if is_error:
            return self.convert(tensor) if self.share else exact.clone()
        generator = torch.Generator(exact.device).manual_seed(0)
        signs = torch.rand(exact.shape, dtype=torch.float64, device=exact.device, generator=generator) - 0.5
        return exact * (1 + self.share * signs.sign())
