"""Decisions that the exact companions would have taken otherwise, by more than an honest error.

Companions follow the decisions of the run, so a wrong one leaves no error behind. Near ties are honest: where two
values differ by less than the error that each may have, the format cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ampcheck.shadow.bounds import JUDGED_UNIT, SLACK, floor_of
from ampcheck.shadow.call import Call
from ampcheck.shadow.companions import MOVE, CompanionStore, has_companions


@dataclass(frozen=True, slots=True)
class Decided:
    """Decisions of one op that exact would have taken otherwise. margin: how far the worst lies beyond a tie, relative
    to the values that were compared; limit: the margin that an honest error may turn."""

    elements: int
    numel: int
    margin: float
    limit: float


_WINNERS = ("argmax", "argmin")
_ROWS = 8
_CLEARLY = 0.05
"""A part of the deviation of a row by which its winner may miss the best."""

_MANY = 0.25
"""The share of rows above which such misses are no accident."""

_Margin = Callable[[Call, CompanionStore], "tuple[torch.Tensor, torch.Tensor] | None"]
_MARGINS: dict[str, _Margin] = {}


def _decides(*names: str) -> Callable[[_Margin], _Margin]:
    def register(function: _Margin) -> _Margin:
        _MARGINS.update(dict.fromkeys(names, function))
        return function

    return register


def decides(call: Call) -> bool:
    """Whether an op takes decisions that can be compared."""
    return call.name in _MARGINS


def examine_decision(call: Call, store: CompanionStore) -> Decided | None:
    """Compare the decisions of an op that ran with those of its exact inputs; None where all are honest."""
    unit = max((store.of(t).unit for t in call.inputs), default=0.0)
    if unit < JUDGED_UNIT:
        return None
    margins = _MARGINS[call.name](call, store)
    if margins is None:
        return None
    margin, scale = margins
    if all(store.of(t).whole for t in call.inputs):
        limit = 0.0  # whole numbers have no honest error
    else:
        limit = sum((_doubt(t, store, unit) for t in call.inputs), 0.0)
    wrong = (margin > limit * scale) | _wholesale(call, margin, store)
    if not bool(wrong.any()):
        return None
    worst = (margin / scale.clamp_min(1e-300)).where(wrong, 0.0)
    return Decided(int(wrong.sum()), margin.numel(), float(worst.max()), limit)


def _wholesale(call: Call, margin: torch.Tensor, store: CompanionStore) -> torch.Tensor:
    """Winners that miss the best clearly, in many rows: near ties are few, unless the format is too coarse."""
    if call.name not in _WINNERS or margin.numel() < _ROWS:
        return torch.zeros_like(margin, dtype=torch.bool)
    exact = store.exact(call.args[0])
    dim = call.argument("dim")
    width = exact.std() if dim is None or not isinstance(dim, int) else exact.std(dim, keepdim=True)
    lost = margin > _CLEARLY * (width if width.numel() == 1 else width.reshape(margin.shape))
    return lost & (lost.double().mean() > _MANY)


def _doubt(tensor: torch.Tensor, store: CompanionStore, unit: float) -> float:
    """The honest error of an element of a tensor, relative to the larger of its magnitude and the typical one."""
    exact, moved = store.exact(tensor), store.moved(tensor)
    known = exact.isfinite() & moved.isfinite()
    size = float(torch.linalg.vector_norm(torch.where(known, exact, 0.0)))
    spread = float(torch.linalg.vector_norm(torch.where(known, moved - exact, 0.0)))
    floor = floor_of(store.of(tensor).depth)
    return SLACK * (spread / max(size, 1e-300) * unit / MOVE + floor * unit)


def _scale(exact: torch.Tensor) -> torch.Tensor:
    """The magnitude of each element, or the typical one of the tensor where that is larger."""
    magnitude = torch.where(exact.isfinite(), exact, 0.0).abs()
    return magnitude.clamp_min(float(magnitude.square().mean().sqrt())) if exact.numel() else magnitude


@_decides("lt", "le", "gt", "ge")
def _compared(call: Call, store: CompanionStore) -> tuple[torch.Tensor, torch.Tensor]:
    """Margin: how far apart the two sides are where exact compares otherwise."""
    left, right = (store.exact(v) if has_companions(v) else torch.as_tensor(v) for v in call.args[:2])
    expected = call.op(left, call.args[1] if not isinstance(call.args[1], torch.Tensor) else right)
    margin = torch.where(expected != call.out, (left - right).abs().double(), 0.0)
    margin = torch.where(margin.isfinite(), margin, 0.0)
    scale = torch.maximum(
        _scale(left.double()), right.double().abs() if not has_companions(call.args[1]) else _scale(right)
    )
    return margin, scale.expand(margin.shape)


@_decides("argmax", "argmin")
def _best(call: Call, store: CompanionStore) -> tuple[torch.Tensor, torch.Tensor]:
    """Margin: what exact loses by the choice of the run."""
    exact, dim = store.exact(call.args[0]), call.argument("dim")
    if dim is None:
        exact, index, dim = exact.reshape(-1), call.out.reshape(1), 0
    else:
        index = call.out if call.argument("keepdim") else call.out.unsqueeze(dim)
    best = exact.amax(dim, keepdim=True) if call.name == "argmax" else exact.amin(dim, keepdim=True)
    return _lost(best, exact.gather(dim, index), exact)


@_decides("topk", "sort", "kthvalue", "median", "max", "min")
def _selected(call: Call, store: CompanionStore) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Margin: how far the values at the indices of the run are from those that exact selects."""
    if not isinstance(call.out, (list, tuple)) or len(call.out) != 2 or not has_companions(call.args[0]):
        return None
    exact = store.exact(call.args[0])
    own = call.op(exact, *call.args[1:], **call.kwargs)[0]
    return _lost(own, store.exact(call.out[0]), exact)


@_decides("searchsorted", "bucketize")
def _placed(call: Call, store: CompanionStore) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Margin: how far outside of its interval exact puts a value."""
    first, second = (
        v if isinstance(v, torch.Tensor) else torch.as_tensor(v, dtype=torch.float64) for v in call.args[:2]
    )
    edges, values = (first, second) if call.name == "searchsorted" else (second, first)
    if edges.dim() != 1 or not edges.numel():
        return None
    edges, values = (store.exact(v) if has_companions(v) else v.double() for v in (edges, values))
    padded = torch.cat([edges.new_tensor([-torch.inf]), edges, edges.new_tensor([torch.inf])])
    low, high = padded[call.out], padded[call.out + 1]
    margin = torch.maximum(low - values, values - high).clamp_min(0.0)
    return margin, _scale(values)


@_decides("_to_copy")
def _truncated(call: Call, store: CompanionStore) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Margin: how far exact lies outside of the values that truncate to the integer of the run."""
    dtype = call.kwargs.get("dtype")
    if dtype is None or dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return None
    exact, number = store.exact(call.args[0]), call.out.double()
    low = torch.where(number > 0, number, number - 1)
    high = torch.where(number < 0, number, number + 1)
    margin = torch.maximum(low - exact, exact - high).clamp_min(0.0)
    return torch.where(margin.isfinite(), margin, 0.0), _scale(exact)


def _lost(best: torch.Tensor, picked: torch.Tensor, exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    margin = torch.where((best - picked).isfinite(), (best - picked).abs(), 0.0)
    typical = float(torch.where(exact.isfinite(), exact, 0.0).square().mean().sqrt()) if exact.numel() else 0.0
    return margin, torch.maximum(best.abs(), picked.abs()).nan_to_num(0.0, 0.0, 0.0).clamp_min(typical)
