"""Decisions that the exact companions would have taken otherwise, by more than an honest error.

Companions follow the decisions of the run, so a wrong one leaves no error behind. Near ties are honest: where two
values differ by less than the error that each may have, the format cannot tell them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from ampcheck.facts.memory import dtype_name, has_companions, roundoff
from ampcheck.facts.values import CompanionStore
from ampcheck.records.faults import COLLISION, DECISION, ENDS, Fault
from ampcheck.records.results import JUDGED_UNIT, MOVE, SLACK, Examination
from ampcheck.shadow.bounds import floor_of
from ampcheck.shadow.call import Call
from ampcheck.shadow.cause import fault_at, largest_of
from ampcheck.shadow.norms import difference
from ampcheck.shadow.suspects import place_of

_FLOAT32 = 2.0**-20
"""Error that float32, in which moved is computed, may add by itself."""

_FEWEST = 4
"""Decisions of one op from which a share of them says something."""

_CLEARLY = 0.05
"""A part of the deviation of the values by which one that is selected may miss the best."""

_STEP = 0.25
"""The error of the steps of a table, relative to them, from which it is another table."""

_MANY = 0.2
"""The share of decisions above which such misses are no near ties: the format is too coarse for the values."""


@dataclass(frozen=True, slots=True)
class Margins:
    """Margins of the decisions of the run, by exact.

    margin: how far the decision of the run lies from a tie, 0 where exact decides alike. scale: the magnitude of the
    values that were compared. width: how far these values lie apart; None where decisions have nothing in common.
    tied: the run decided between equal values. sure: no decision is a near tie.
    """

    margin: torch.Tensor
    scale: torch.Tensor
    width: torch.Tensor | None = None
    tied: torch.Tensor | None = None
    sure: bool = False


def decides(call: Call, *, faulty: bool) -> bool:
    """Return whether an op takes decisions that can be compared. faulty: its inputs suffer from a fault.

    Equality turns by rounding in any run where values lie close, and is no decision by itself. Nor is a cast to
    floating numbers.
    """
    kind = call.traits.decides
    return kind in _MARGINS and (faulty or kind != "equality") and not (kind == "cast" and call.fresh)


def tests_finiteness(call: Call) -> bool:
    """Return whether an op does nothing but test whether values are finite: `x == x`, `abs(x) != inf`."""
    if call.traits.decides not in ("order", "equality"):
        return call.traits.decides == "finite"
    first, second = call.args[:2]
    return first is second or (isinstance(second, (int, float)) and math.isinf(second))


def chooses_nan(call: Call, store: CompanionStore) -> bool:
    """Return whether an op chooses a NaN of exact, which is larger than any number to `topk`, and wins any `argmax`."""
    if call.traits.decides != "best" and not (call.name == "topk" and call.argument("largest") is not False):
        return False
    return bool(store.exact(call.inputs[0]).isnan().any())


def examine_decision(call: Call, store: CompanionStore, blurred: Fault | None) -> Fault | None:
    """The decisions of an op that ran and that its exact inputs would have taken otherwise; None where all are honest.

    The error is how far the worst lies beyond a tie, relative to the values that were compared; the limit is what an
    honest error may turn. blurred: what rounded away the differences between the values before, and is at fault where
    many decisions turn by it; the note then says which op decides.
    """
    unit = max([store.of(t).unit for t in call.inputs], default=0.0)
    if unit < JUDGED_UNIT:
        return None
    margins = _MARGINS[call.traits.decides](call, store)
    if margins is None or not margins.margin.numel():
        return None
    counted = call.name == "_to_copy"  # to integers
    if all(store.of(t).whole or (counted and _is_constant(t, store)) for t in call.inputs):
        limit = 0.0  # whole numbers, and bins of positions or constants alone, have no honest error
    else:
        limit = SLACK * sum(doubt(t, store, unit, floor_of(store.of(t).depth)) for t in call.inputs)
    wrong, many = margins.margin > (0.0 if margins.sure else limit * margins.scale), False
    if blurred is not None and margins.width is not None and margins.margin.numel() >= _FEWEST:
        clearly = margins.margin > _CLEARLY * margins.width
        if margins.tied is not None:
            clearly |= margins.tied & (margins.margin > 0)
        many = bool(clearly.double().mean() > _MANY)
        wrong |= clearly & many
    by_mean = limit and call.traits.decides == "order" and not margins.sure
    if not int(wrong.sum()) > (unit * wrong.numel() if by_mean else 0):
        return None  # a mean over so many does not show so few
    worst = (margins.margin / margins.scale).where(wrong & (margins.scale > 0), wrong.double())
    skipped = bool((wrong & (margins.scale == 0)).any())  # the format skips the integers that exact decides for
    seen = Examination(margins.margin.numel(), error=float(worst.max()), limit=limit)
    ends = _beyond_range(call)
    fault = fault_at(COLLISION if skipped or ends else DECISION, call, call.inputs[0], seen)
    fault = replace(fault, elements=int(wrong.sum()), amax_in=largest_of(call.inputs[0]), note=ends)
    if blurred is not None and many and fault.kind == DECISION:
        return replace(fault, where=blurred.where, note=place_of(fault.where).removeprefix("aten::"))
    return fault


def _beyond_range(call: Call) -> str:
    """Which integers a conversion to narrow ones does not have, if the values reach beyond them."""
    if call.name != "_to_copy" or call.out.dtype in (torch.int64, torch.bool) or call.out.dtype.is_floating_point:
        return ""
    range_ = torch.iinfo(call.out.dtype)
    low, high = (float(v) for v in torch.aminmax(call.inputs[0].detach().float()))
    beyond = low <= range_.min - 1 or high >= range_.max + 1
    return f"{dtype_name(call.out.dtype)}{ENDS} {range_.min} to {range_.max} only" if beyond else ""


def _is_constant(tensor: torch.Tensor, store: CompanionStore) -> bool:
    """Return whether the values do not depend on any data that may be rounded: nothing moves them."""
    exact, moved = store.exact(tensor), store.moved(tensor)
    apart = torch.where(exact.isfinite(), moved - exact, 0.0)
    return bool((apart.abs() <= _FLOAT32 * exact.abs().nan_to_num(0.0, 0.0, 0.0)).all())


def doubt(tensor: torch.Tensor, store: CompanionStore, unit: float, floor: float) -> float:
    """The honest error of an element of a tensor, relative to the larger of its magnitude and the typical one."""
    spread, size = difference(store.moved(tensor), store.exact(tensor))
    return (spread / max(size, 1e-300) / MOVE + floor) * unit


def _scale(exact: torch.Tensor) -> torch.Tensor:
    """The magnitude of each element, or the typical one of the tensor where that is larger."""
    magnitude = torch.where(exact.isfinite(), exact, 0.0).abs()
    return magnitude.clamp_min(float(magnitude.square().mean().sqrt())) if exact.numel() else magnitude


def _compared(call: Call, store: CompanionStore) -> Margins:
    """Margin: how far apart the two sides are where exact compares otherwise."""
    sides = (v if isinstance(v, torch.Tensor) else torch.tensor(v, device="cpu") for v in call.args[:2])
    left, right = (store.exact(v) if has_companions(v) else v if v.is_complex() else v.double() for v in sides)
    expected = call.op(left, call.args[1] if not isinstance(call.args[1], torch.Tensor) else right)
    margin = torch.where(expected != call.out, (left - right).abs().double(), 0.0)
    margin = torch.where(margin.isfinite(), margin, 0.0)
    scale = torch.maximum(
        _scale(left.double()), right.double().abs() if not has_companions(call.args[1]) else _scale(right)
    )
    scale = scale.expand(margin.shape)
    wrong = (expected != call.out) & (margin > _FLOAT32 * scale)
    tensors = all(isinstance(v, torch.Tensor) for v in call.args[:2])
    ties = wrong & (call.args[0] == call.args[1]) if tensors else torch.zeros_like(wrong)
    return Margins(margin, scale, tied=ties)


def _best(call: Call, store: CompanionStore) -> Margins:
    """Margin: what exact loses by the choice of the run."""
    exact, dim = store.exact(call.args[0]), call.argument("dim")
    if dim is None:
        exact, index, dim = exact.reshape(-1), call.out.reshape(1), 0
    else:
        index = call.out if call.argument("keepdim") else call.out.unsqueeze(dim)
    own = exact.argmax(dim, keepdim=True) if call.name == "argmax" else exact.argmin(dim, keepdim=True)
    real = call.args[0].reshape(exact.shape)
    tied = real.gather(dim, own) == real.gather(dim, index)
    return _lost(exact.gather(dim, own), exact.gather(dim, index), exact, dim, tied)


def _selected(call: Call, store: CompanionStore) -> Margins | None:
    """Margin: how far the values at the indices of the run are from those that exact selects."""
    if not isinstance(call.out, (list, tuple)) or len(call.out) != 2 or not has_companions(call.args[0]):
        return None
    exact = store.exact(call.args[0])
    own, place = call.op(exact, *call.args[1:], **call.kwargs)[:2]
    own, picked = own.reshape(call.out[0].shape), store.exact(call.out[0])
    dim = call.argument("dim", -1)
    if own.dim() != exact.dim() or not exact.dim():
        return _lost(own, picked, exact, None)
    real = [call.args[0].gather(dim, place), call.out[0]]
    if call.name == "topk" and not call.argument("sorted", True):  # a set: its order differs between kernels
        own, picked, *real = (values.sort(dim).values for values in (own, picked, *real))
    return _lost(own, picked, exact, dim, real[0] == real[1])


def _placed(call: Call, store: CompanionStore) -> Margins | None:
    """Margin: how far outside of its interval exact puts a value."""
    first, second = (
        v if isinstance(v, torch.Tensor) else torch.as_tensor(v, dtype=torch.float64, device="cpu")
        for v in call.args[:2]
    )
    edges, values = (first, second) if call.name == "searchsorted" else (second, first)
    if edges.dim() != 1 or not edges.numel():
        return None
    table = edges.double().diff()
    edges, values = (store.exact(v) if has_companions(v) else v.double() for v in (edges, values))
    padded = torch.cat([edges.new_tensor([-torch.inf]), edges, edges.new_tensor([torch.inf])])
    low, high = padded[call.out], padded[call.out + 1]
    margin = torch.maximum(low - values, values - high).clamp_min(0.0)
    steps = edges.diff()
    sure = bool((table - steps).abs().sum() > _STEP * steps.abs().sum())
    return Margins(margin, _scale(values), sure=sure)


def _rounded(call: Call, store: CompanionStore) -> Margins | None:
    """Margin: how far exact lies outside of the values that the op makes the integer of the run; where the format skips
    integers, how many of them the run is off."""
    if not isinstance(call.out, torch.Tensor) or len(call.args) > 1 or call.kwargs:
        return None
    exact, number = store.exact(call.args[0]), call.out.double()
    below, above = _KEPT_BY[call.name]
    outside = torch.maximum(number - below - exact, exact - number - above).clamp_min(0.0)
    off = (call.op(exact) - number).abs()
    coarse = _skips_integers(call.args[0].dtype, number, exact) & (off >= 1)
    margin = torch.where(coarse, off, outside)
    return Margins(torch.where(margin.isfinite(), margin, 0.0), torch.where(coarse, 0.0, _scale(exact)))


def _skips_integers(dtype: torch.dtype, number: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Where the format holds only every second integer or fewer: beyond 2**p, with a significand of p bits."""
    return torch.maximum(number.abs(), exact.abs()) * roundoff(dtype) > 1.0


def _truncated(call: Call, store: CompanionStore) -> Margins | None:
    """Margin: how far exact lies outside of the values that truncate to the integer of the run."""
    dtype = call.kwargs.get("dtype")
    if dtype is None or dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return None
    exact, number = store.exact(call.args[0]), call.out.double()
    low = torch.where(number > 0, number, number - 1)
    high = torch.where(number < 0, number, number + 1)
    margin = torch.maximum(low - exact, exact - high).clamp_min(0.0)
    coarse = _skips_integers(call.args[0].dtype, number, exact) & (margin >= 1)
    return Margins(torch.where(margin.isfinite(), margin, 0.0), torch.where(coarse, 0.0, _scale(exact)))


def _lost(
    best: torch.Tensor, picked: torch.Tensor, exact: torch.Tensor, dim: int | None, tied: torch.Tensor | None = None
) -> Margins:
    margin = torch.where((best - picked).isfinite(), (best - picked).abs(), 0.0)
    known = torch.where(exact.isfinite(), exact, 0.0)
    typical = float(known.square().mean().sqrt()) if exact.numel() else 0.0
    scale = torch.maximum(best.abs(), picked.abs()).nan_to_num(0.0, 0.0, 0.0).clamp_min(typical)
    width = known.std(dim, correction=0, keepdim=True) if dim is not None and exact.dim() else known.std(correction=0)
    return Margins(margin, scale, width, tied)


_KEPT_BY = {"round": (0.5, 0.5), "floor": (0.0, 1.0), "ceil": (1.0, 0.0), "trunc": (1.0, 1.0)}
"""Distances below and above an integer of the values that an op makes this integer."""

_MARGINS: Mapping[str, Callable[[Call, CompanionStore], Margins | None]] = {  # by what is decided, see `Traits`
    **dict.fromkeys(("order", "equality"), _compared),
    "best": _best,
    **dict.fromkeys(("selection", "extreme"), _selected),
    "bin": _placed,
    "integer": _rounded,
    "cast": _truncated,
}
