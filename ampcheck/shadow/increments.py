"""Increments that a sum has taken up: the difference of `new = old + update` and `old`.

Code that takes this difference has the update already. It asks what rounding left of it: a compensated sum (Kahan) adds
the rest to the next update, and a two-sum returns it. The difference is off by the rounding of the sum, which may be
far more than the update, and is no fault: what is made of it may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch

from ampcheck.facts.history import Sum
from ampcheck.facts.values import Companions, CompanionStore
from ampcheck.records.results import FLOOR, MOVE
from ampcheck.shadow.call import Call, item_of

_numbers = count()

_MOST_ROUNDOFFS = 2.0
"""Bound of the distance of a sum from its value without rounding, in unit roundoffs: what compensates keeps less."""


def follow_lineage(call: Call, store: CompanionStore) -> None:
    """Give results the names of the values that they copy, or add up."""
    op = call.traits
    if op.copies is None and not op.adds:
        for companions in call.after[: len(call.written)]:
            companions.lineage = None
        return
    for number, (result, companions) in enumerate(zip(call.written or call.fresh, call.after, strict=False)):
        values = [v for v in _values(call, number) if v.shape == result.shape]
        if op.copies is not None:
            source = values[-1] if values else None
            copied = store.known(source) if source is not None else None
            if source is None or copied is None or result.numel() != companions.numel:
                companions.lineage = None
            else:
                own = _name_of(source, copied)
                companions.lineage = Sum(own, copied.lineage.terms if copied.lineage else frozenset())
            continue
        companions.lineage = Sum(next(_numbers), frozenset(_terms(call, number, result, store)))


def take_up(call: Call, tensor: torch.Tensor, store: CompanionStore) -> bool:
    """Return whether a result is the difference between a sum and one of its terms, off by roundings of the sum.

    Moved then rounds the sum as the run did, as far as that is honest, and takes up as much.
    """
    number = next((i for i, result in enumerate(call.written or call.fresh) if result is tensor), 0)
    values = _values(call, number)
    if len(values) != 2 or sorted(call.weights) != [-1, 1]:
        return False
    if call.weights[0] < 0:
        values.reverse()
    for (new, old), sign in ((values, 1), (values[::-1], -1)):
        whole, part = store.known(new), store.known(old)
        if whole is None or part is None or whole.lineage is None or _name_of(old, part) not in whole.lineage.terms:
            continue
        exact = store.exact(tensor)
        error = torch.linalg.vector_norm(tensor.to(exact.dtype) - exact)
        size = torch.linalg.vector_norm(store.exact(old if new is tensor else new))
        if honest := bool(error <= FLOOR * whole.unit * size):
            _follow_rounding(new, sign, tensor, store)
        return honest
    return False


def _follow_rounding(sum_: torch.Tensor, sign: int, tensor: torch.Tensor, store: CompanionStore) -> None:
    """sign: that of the sum in the difference."""
    companions, whole = store.of(tensor), store.of(sum_)
    exact, before = store.exact(tensor), store.moved(tensor).clone()
    companions.own()
    store.moved(tensor).copy_(exact + (tensor.to(exact.dtype) - exact) * (MOVE / companions.unit))
    if sum_ is tensor:
        return
    whole.own()
    sums, moved = store.exact(sum_), store.moved(sum_)
    apart = moved - sums + sign * (store.moved(tensor) - before)
    most = _MOST_ROUNDOFFS * MOVE * sums.abs()
    moved.copy_(sums + torch.minimum(torch.maximum(apart, -most), most))


def _terms(call: Call, number: int, result: torch.Tensor, store: CompanionStore) -> Iterator[int]:
    """The names of the terms that a sum adds without a factor."""
    weights, values = call.weights, _values(call, number)
    if weights and weights[0] != 1:
        values.reverse()
    for value in values if weights == (1, 1) else values[:1]:
        companions = store.known(value)
        if companions is not None and value.shape == result.shape:
            yield _name_of(value, companions)


def _name_of(tensor: torch.Tensor, companions: Companions) -> int:
    """The name of the present values of a tensor, or of a part of a storage."""
    if companions.lineage is None:
        companions.lineage = Sum(next(_numbers), frozenset())
    name = companions.lineage.name
    if tensor.numel() == companions.numel:
        return name
    return hash((name, tensor.storage_offset(), tensor.shape, tensor.stride()))


def _values(call: Call, number: int) -> list[torch.Tensor]:
    """The floating tensors among the arguments that belong to one result of an op, which may take lists."""
    values = [item_of(value, number) for value in call.args] if call.traits.foreach else call.args
    known = set(map(id, call.inputs))
    return [value for value in values if id(value) in known]
