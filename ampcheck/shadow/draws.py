"""Uniform numbers that the run draws in 16 bits: few different ones, the lower end of the range among them.

A draw is data, and whatever is made of it is judged for the numbers that were drawn. float16 has 2,048 numbers from 0
to 1 and bfloat16 has 256, and one draw in as many is exactly 0, which float32 draws once in 16 million. Where an op
makes an infinity of it, as `log(u)` and `erfinv(2 * u - 1)` do, float64 agrees, and the format of the draw is at fault.
So both ends are followed as single numbers, beside the values: the lower end in the format of the run, and the smallest
number above it that float32 draws. An op that makes an infinity of the first and not of the second is at fault, and its
exact companion goes on with the second. What stays finite is left alone: dropout masks, noise, initial weights.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ampcheck.core.errors import OP_ERRORS
from ampcheck.shadow.call import Call, leaves
from ampcheck.shadow.companions import CompanionStore, has_companions, roundoff
from ampcheck.shadow.faults import DRAWS
from ampcheck.shadow.memory import dtype_name, finite

_UNIFORM = frozenset("rand rand_like uniform uniform_".split())

_COPIES = frozenset("_to_copy clone contiguous flip roll repeat expand_copy view_copy _reshape_copy".split())
"""Ops whose results are the same numbers, maybe elsewhere."""

_OFTEN = 16
"""How often a comparison comes out the rare way in a run, at least, so that its rate says something."""

_OFF = 0.5
"""The deviation of the rate of a comparison from the rate that is asked for, relative to it, that is a finding."""

_FLOAT32 = 2.0**-24
"""The smallest number above 0 that float32 draws from 0 to 1."""


class Draw(NamedTuple):
    """What uniform numbers may be. low: made of the lower end of the range, one element in the format of the run;
    above: made of the next number of float32, in float64. number: of different numbers that the format draws. format:
    its name. plain: the range from which the numbers are drawn, where they are as they were drawn."""

    low: torch.Tensor
    above: torch.Tensor
    number: int
    format: str
    plain: tuple[float, float] | None = None

    def __str__(self) -> str:
        return f"{self.format} {DRAWS} {self.number:,} different numbers, and one in {self.number:,} is the lower end"


def follow_draws(call: Call, store: CompanionStore) -> None:
    """Follow the ends of a draw through an op that ran, and its companions; mend what is infinite in exact as well."""
    if call.name in _UNIFORM:
        for tensor in call.written + call.fresh:
            store.of(tensor).draw = _drawn(call, tensor, store)
        return
    draw = next((companions.draw for companions in call.before if companions.draw is not None), None)
    if draw is None:
        return
    made = _made(call, draw)
    for tensor in call.written + call.fresh:
        companions = store.of(tensor)
        whole = tensor.numel() == companions.numel and made is not None
        companions.draw = made if whole else None
        if whole and made is not None and bool(made.above.isfinite()) and not bool(finite(made.low)):
            call.drawn = str(draw)
            _mend(tensor, made.above, store)
            companions.draw = None


def with_low_digits(tensor: torch.Tensor, other: Any, name: str, store: CompanionStore) -> torch.Tensor | None:
    """Uniform numbers with the digits that their format leaves out, drawn by a generator of our own, if a comparison
    with a number asks for a rate that the format does not have: `rand(n) < 0.001` in bfloat16 has 1 in 256. Else None.

    name: `lt` or another comparison, of the tensor with the number.
    """
    companions = store.known(tensor)
    draw = companions.draw if companions is not None else None
    number = store.exact(other) if has_companions(other) else other
    if draw is None or draw.plain is None or (isinstance(number, torch.Tensor) and number.numel() != 1):
        return None
    low, high = draw.plain
    asked = (float(number) - low) / (high - low)  # the rate of what is below the number
    whole = math.floor if name in ("le", "gt") else math.ceil
    rate = (whole(asked * draw.number) + (name in ("le", "gt"))) / draw.number
    rare = min(asked, 1 - asked)
    if tensor.numel() * rare < _OFTEN or abs(rate - asked) <= _OFF * rare:
        return None
    generator = torch.Generator("cpu").manual_seed(tensor.numel())
    digits = torch.rand(tensor.shape, dtype=torch.float64, device="cpu", generator=generator).to(tensor.device)
    return tensor.double() + digits * ((high - low) / draw.number)


def _drawn(call: Call, tensor: torch.Tensor, store: CompanionStore) -> Draw | None:
    low, high = float(call.argument("from", 0.0)), float(call.argument("to", 1.0))
    low_precision = tensor.dtype in (torch.float16, torch.bfloat16)
    if not low_precision or not low < high or tensor.numel() != store.of(tensor).numel:
        return None
    ends = (
        torch.tensor([low], device=tensor.device),
        torch.tensor([low + (high - low) * _FLOAT32], device=tensor.device),
    )
    number = round(1 / roundoff(tensor.dtype))
    return Draw(ends[0].to(tensor.dtype), ends[1].double(), number, dtype_name(tensor.dtype), (low, high))


def _made(call: Call, draw: Draw) -> Draw | None:
    """The ends after an op on each element; None where it has other operands than numbers, or is none on elements."""
    tensors = {id(t) for t in leaves((call.args, tuple(call.kwargs.values())))}
    if tensors != {id(call.inputs[0])} or len(call.fresh or call.written) != 1:
        return None
    if call.name in _COPIES:
        return draw._replace(low=draw.low.to((call.fresh or call.written)[0].dtype))
    if torch.Tag.pointwise not in call.op.tags or call.schema.random or call.schema.resets:
        return None
    try:
        low, above = (
            call.op(*(end.clone() if a is call.inputs[0] else a for a in call.args), **call.kwargs)
            for end in (draw.low, draw.above)
        )
    except OP_ERRORS:
        return None
    return draw._replace(low=low, above=above, plain=None)


def _mend(tensor: torch.Tensor, above: torch.Tensor, store: CompanionStore) -> None:
    """Let what is infinite on both sides be finite in the companions."""
    lost = ~finite(tensor) & ~store.exact(tensor).isfinite()
    if bool(lost.any()):
        store.of(tensor).own()
        for side in (store.exact(tensor), store.moved(tensor)):
            side.masked_fill_(lost, float(above))
