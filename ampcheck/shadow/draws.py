"""Random numbers that the run draws in 16 bits: few different ones, the lower end of the range among them.

A draw is data, and whatever is made of it is judged for the numbers that were drawn. PyTorch rounds 24 bits to the
format of a uniform draw, and takes the lower end for what rounds to the upper one. From 1/2 to 1 float16 has 1,024
numbers and bfloat16 has 128, and one draw in 4,096 or 512 is exactly 0, which float32 draws once in 16 million. Where
an op makes an infinity of it, as `log(u)` and `erfinv(2 * u - 1)` do, float64 agrees, and the format of the draw is at
fault. So both ends are followed as single numbers, beside the values: the lower end in the format of the run, and the
smallest number above it that float32 draws. An op that makes an infinity of the first and not of the second is at
fault, and its exact companion goes on with the second. A sample of the range is followed with each: what is made of
that of the run may leave out many of the integers that the other reaches, such as timesteps. And noise that is added
to whole numbers may round to them again. All else is left alone: dropout masks, noise, initial weights.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ampcheck.core.errors import OP_ERRORS
from ampcheck.shadow.bounds import Examination
from ampcheck.shadow.call import Call, leaves
from ampcheck.shadow.cause import fault_at, with_sizes
from ampcheck.shadow.companions import CompanionStore, has_companions, roundoff
from ampcheck.shadow.faults import ABSORPTION, COLLISION, DRAWS, Fault
from ampcheck.shadow.memory import dtype_name, finite

_UNIFORM = frozenset("rand rand_like uniform uniform_".split())

_NOISE = _UNIFORM | frozenset("randn randn_like normal normal_ exponential exponential_ cauchy_ log_normal_".split())

_SCALES = frozenset("mul div".split())
"""Ops that make noise of noise and any other factor."""

_COPIES = frozenset("_to_copy clone contiguous flip roll repeat expand_copy view_copy _reshape_copy".split())
"""Ops whose results are the same numbers, maybe elsewhere."""

_OFTEN = 16
"""How often a comparison comes out the rare way in a run, at least, so that its rate says something."""

_OFF = 0.5
"""The deviation of the rate of a comparison from the rate that is asked for, relative to it, that is a finding."""

_FLOAT32 = 2.0**-24
"""The smallest number above 0 that float32 draws from 0 to 1."""


_SAMPLE = 1 << 14
"""Numbers of a range that are followed, beside its lower end."""

_REACHED = 0.8
"""The share of the integers that float64 makes of a draw, below which those that never occur are a finding."""

_ABSORBED = 0.5
"""The share of whole numbers that noise leaves whole, above which it is a finding."""

_ALL = 0.95
"""The share of the noise that must be smaller than 1: more than that was not to fill the gap between whole numbers."""

_FEWEST = 16
"""Integers in a range, or elements of a sum, from which a share of them says something."""


class Draw(NamedTuple):
    """What uniform numbers may be. low: made of the lower end of the range, and of a sample of it, in the format of the
    run; above: made of the next number of float32, and of the sample, in float64. number: of steps that the format has
    in its upper half, twice. format: its name. plain: the range from which the numbers are drawn, where they are as
    they were drawn."""

    low: torch.Tensor
    above: torch.Tensor
    number: int
    format: str
    plain: tuple[float, float] | None = None

    def __str__(self) -> str:
        upper = f"{self.number // 2:,} different numbers in the upper half of the range"
        return f"{self.format} {DRAWS} {upper}, and one in {2 * self.number:,} is the lower end"


def follow_draws(call: Call, store: CompanionStore) -> None:
    """Follow the ends of a draw through an op that ran, and its companions; mend what is infinite in exact as well."""
    noise = call.name in _NOISE
    if noise or any(companions.noise for companions in call.before):
        noise = noise or _keeps_noise(call)
        for tensor in call.written + call.fresh:
            store.of(tensor).noise = noise
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
        if whole and made is not None and bool(made.above[0].isfinite() & ~finite(made.low[0])):
            call.drawn = str(draw)
            _mend(tensor, float(made.above[0]), store)
            companions.draw = None


def with_low_digits(tensor: torch.Tensor, other: Any, name: str, store: CompanionStore) -> torch.Tensor | None:
    """Uniform numbers with the digits that their format leaves out, drawn by a generator of our own, if a comparison
    with a number asks for a rate that the format does not have: `rand(n) < 0.001` in bfloat16 has 0.003. Else None.

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
    sample = (torch.arange(_SAMPLE, dtype=torch.float64, device=tensor.device) + 0.5) / _SAMPLE
    above = low + (high - low) * torch.cat([sample.new_tensor([_FLOAT32]), sample])
    drawn = above.to(tensor.dtype)
    drawn = torch.where(drawn < high, drawn, low)
    drawn[0] = low
    return Draw(drawn, above, round(1 / roundoff(tensor.dtype)), dtype_name(tensor.dtype), (low, high))


def _made(call: Call, draw: Draw) -> Draw | None:
    """The ends after an op on each element; None where it has other operands than numbers, or is none on elements."""
    if not _is_of_one(call, source := _source(call, draw)) or len(call.fresh or call.written) != 1:
        return None
    if call.name in _COPIES:
        return draw._replace(low=draw.low.to((call.fresh or call.written)[0].dtype))
    if torch.Tag.pointwise not in call.op.tags or call.schema.random or call.schema.resets:
        return None
    try:
        low, above = (
            call.op(*(end.clone() if a is source else a for a in call.args), **call.kwargs)
            for end in (draw.low, draw.above)
        )
    except OP_ERRORS:
        return None
    return draw._replace(low=low, above=above, plain=None)


def _source(call: Call, draw: Draw) -> torch.Tensor:
    return next(t for t, c in zip(call.inputs, call.before, strict=True) if c.draw is draw)


def _is_of_one(call: Call, source: torch.Tensor) -> bool:
    """Whether all other operands of an op are numbers, or tensors of one."""
    others = (t for t in leaves((call.args, tuple(call.kwargs.values()))) if t is not source)
    return all(t.dim() == 0 for t in others) and source.dim() > 0


def _keeps_noise(call: Call) -> bool:
    """Whether an op makes noise of noise."""
    if call.name in _COPIES or call.schema.base in _SCALES:
        return True
    source = next(t for t, c in zip(call.inputs, call.before, strict=True) if c.noise)
    pointwise = torch.Tag.pointwise in call.op.tags and not (call.schema.random or call.schema.resets)
    return pointwise and _is_of_one(call, source)


def skipped_integers(call: Call) -> Fault | None:
    """The integers that float64 makes of a draw, and that a conversion to integers never makes in the format of the
    draw, as a fault; None where it makes nearly all."""
    if call.name != "_to_copy" or call.fresh:
        return None
    draw = next((companions.draw for companions in call.before if companions.draw is not None), None)
    if draw is None or call.kwargs.get("dtype") is torch.bool:
        return None
    ints, wide = (torch.unique(end[1:][end[1:].isfinite()].double().trunc()) for end in (draw.low, draw.above))
    if wide.numel() < _FEWEST or ints.numel() >= _REACHED * wide.numel():
        return None
    missing = wide.numel() - ints.numel()
    fault = fault_at(COLLISION, call, call.inputs[0], Examination(wide.numel()))
    note = f"{draw.format} {DRAWS} {draw.number // 2:,} different numbers in the upper half of the range"
    largest = float(wide.abs().amax())
    return replace(fault, elements=missing, amax_in=largest, exact_amax=largest, note=note)


def absorbed_noise(call: Call, tensor: torch.Tensor, store: CompanionStore) -> Fault | None:
    """Noise that is added to whole numbers, to fill the gaps between them, and that rounding takes away; None where
    most of the sums lie between whole numbers."""
    if call.noise < 0 or call.schema.base not in ("add", "sub") or tensor.dtype.itemsize > 2:
        return None
    noise = call.inputs[call.noise]
    if tensor.numel() < _FEWEST or any(noise is t for t in call.written):
        return None
    exact = store.exact(tensor)
    gone = (tensor == tensor.round()) & (exact != exact.round())
    share = float(gone.double().mean())
    small = store.exact(noise).abs() < 1
    if share <= _ABSORBED or float(small.double().mean()) < _ALL:
        return None
    seen = Examination(tensor.numel(), error=share)
    return with_sizes(fault_at(ABSORPTION, call, tensor, seen), call, tensor, store)


def _mend(tensor: torch.Tensor, above: float, store: CompanionStore) -> None:
    """Let what is infinite on both sides be finite in the companions."""
    lost = ~finite(tensor) & ~store.exact(tensor).isfinite()
    if bool(lost.any()):
        store.of(tensor).own()
        for side in (store.exact(tensor), store.moved(tensor)):
            side.masked_fill_(lost, above)
