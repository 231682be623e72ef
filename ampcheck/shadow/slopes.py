"""What a value keeps of one that it is made of, as 1 - decay of `(1 - decay) * (mean - weight)`: its slope.

An average may be written by one op (`mean.lerp_(weight, 0.001)`) or by several (`mean.sub_(0.001 * (mean - weight))`).
The slopes of linear ops add up to what a write keeps of the value before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ampcheck.shadow.call import Call, item_of
from ampcheck.shadow.companions import Companions, CompanionStore, has_companions

_LINEAR = frozenset("add sub rsub mul div neg lerp _to_copy clone".split())

_MOST = 4
"""Slopes of one value that are followed."""


class Slope(NamedTuple):
    """The derivative of a value by one that is written: the number of its companions, and of its writes so far."""

    of: int
    writes: int
    share: float


def follow_slopes(call: Call, store: CompanionStore) -> None:
    """Give the results of a linear op the slope of what they are made of."""
    if call.schema.base not in _LINEAR:
        return
    written = [Slope(id(c), c.writes, 1.0) for c in call.before if c.writes]
    sources = {source[:2]: source for source in (*written, *(slope for c in call.before for slope in c.slopes))}
    for number, result in enumerate(call.fresh if sources else ()):
        shares = ((source, _share(call, number, source, store)) for source in sources.values())
        slopes = [source._replace(share=share) for source, share in shares if share]
        store.of(result).slopes = tuple(slopes[:_MOST])


def kept(call: Call, tensor: torch.Tensor, companions: Companions, store: CompanionStore) -> float | None:
    """What a linear op keeps of a tensor that it writes, of all that it is given; None for any other op."""
    if call.name == "copy_":
        return _slope(call.args[1], Slope(id(companions), companions.writes, 1.0), store)
    number = next((i for i, written in enumerate(call.written) if written is tensor), 0)
    return _share(call, number, Slope(id(companions), companions.writes, 1.0), store)


def _share(call: Call, number: int, source: Slope, store: CompanionStore) -> float | None:
    """The derivative of one result of a linear op; None where it is no such op or a factor is no number."""
    if call.schema.base not in _LINEAR:
        return None
    total = 0.0
    for value, factor in _terms(call, number):
        slope = _slope(value, source, store)
        if slope and factor is None:
            return None
        total += slope * (factor or 0.0)
    return total


def _slope(value: object, source: Slope, store: CompanionStore) -> float:
    """The derivative of an argument by the value that the source names."""
    companions = store.known(value) if isinstance(value, torch.Tensor) and has_companions(value) else None
    if companions is None:
        return 0.0
    if id(companions) == source.of:
        return 1.0 if companions.writes == source.writes else 0.0
    return next((slope.share for slope in companions.slopes if slope[:2] == source[:2]), 0.0)


def _terms(call: Call, number: int) -> Iterator[tuple[Any, float | None]]:
    """The arguments that a linear op adds up, each with its factor; None for a factor that is no number."""
    name, values = call.schema.base, [item_of(value, number) for value in call.args]
    first, second = values[0], values[1] if len(values) > 1 else None
    alpha = call.kwargs.get("alpha", values[2] if name in ("add", "sub", "rsub") and len(values) > 2 else 1.0)
    if name in ("add", "sub"):
        yield first, 1.0
        yield second, _number(alpha, -1.0 if name == "sub" else 1.0)
    elif name == "rsub":
        yield first, _number(alpha, -1.0)
        yield second, 1.0
    elif name == "mul":
        yield first, _number(second)
        yield second, _number(first)
    elif name == "div":
        factor = _number(second)
        yield first, 1.0 / factor if factor else None
        yield second, None
    elif name == "lerp":
        weight = _number(values[2] if len(values) > 2 else call.kwargs.get("weight"))
        yield first, None if weight is None else 1.0 - weight
        yield second, weight
    else:
        yield first, -1.0 if name == "neg" else 1.0


def _number(value: Any, sign: float = 1.0) -> float | None:
    """A number, or a tensor on the CPU that is one."""
    if isinstance(value, (int, float)):
        return sign * value
    if isinstance(value, torch.Tensor) and not value.dim() and not value.is_complex() and value.device.type == "cpu":
        return sign * float(value.detach())
    return None
