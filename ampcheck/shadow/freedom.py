"""Freedom of another run: decisions that other roundings may take otherwise, and the lengths of sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from ampcheck.facts.memory import has_companions
from ampcheck.facts.values import CompanionStore
from ampcheck.records.results import FLOOR
from ampcheck.shadow.call import Call, leaves
from ampcheck.shadow.decisions import doubt


@dataclass(frozen=True, slots=True)
class Freedom:
    """Decisions that honest runs may take otherwise.

    near_ties: decisions that an honest error turns, and decided: all decisions, of the op with the most of them by
    share. ties: the indices and integers of all ops that turn, equal values without an order of their own among them.
    kinks: the share of elements that lie as near to where a derivative jumps; kinked: all elements of the op with the
    fewest of them, 0 where no derivative jumps. terms: of the longest sum, whose order is free.
    """

    near_ties: int = 0
    decided: int = 1
    ties: int = 0
    kinks: float = 0.0
    kinked: int = 0
    terms: int = 1

    def kinks_at(self, step: int) -> float:
        """The share of elements on whose side of a kink honest runs differ. After an update runs that differ by less
        than all bounds may differ on a few elements."""
        return self.kinks + (4 / self.kinked if step and self.kinked else 0.0)

    @property
    def share(self) -> float:
        """The share of decisions that an honest error turns."""
        return self.near_ties / self.decided


def with_call(freedom: Freedom, call: Call, store: CompanionStore) -> Freedom:
    """The freedom of a run after one more op."""
    inputs = [t for t in call.inputs if t.numel()]
    if not inputs or call.traits.view:
        return freedom
    if (terms := _terms(call, inputs)) > freedom.terms:
        freedom = replace(freedom, terms=terms)
    if call.traits.kink == "zero" or (call.traits.kink == "pixel" and call.args[3] == 0):
        gaps, errors = _to_kink(call, _Known(store, inputs[-1]), inputs[-1])
        share = 2 * _turned(gaps, errors.where(gaps > 0, 0.0)) / gaps.numel()
        kinked = min(gaps.numel(), freedom.kinked or gaps.numel())
        return replace(freedom, kinks=max(freedom.kinks, share), kinked=kinked)
    if (near := _GAPS.get(call.traits.decides)) is not None:
        gaps, errors = near(call, _Known(store, inputs[0]))
        turned = _turned(gaps, errors)
        equal = int((gaps == 0).sum()) if call.traits.decides == "selection" and not call.argument("stable") else 0
        freedom = replace(freedom, ties=freedom.ties + max(turned, equal))
        if turned / max(1, gaps.numel()) > freedom.share:
            return replace(freedom, near_ties=turned, decided=gaps.numel())
    return freedom


class _Known:
    """Facts about the arguments of an op: exact values, and how far an honest run may lie from them.

    scale: the argument whose typical magnitude the errors are relative to.
    """

    def __init__(self, store: CompanionStore, scale: torch.Tensor) -> None:
        self._store = store
        known = self.exact(scale)
        known = known[known.isfinite()]
        self._typical = float(known.square().mean().sqrt()) if known.numel() else 0.0

    def exact(self, value: object) -> torch.Tensor:
        """The exact values of an argument, float64; integers and numbers as they are."""
        if has_companions(value):
            return self._store.exact(value).double()  # type: ignore[arg-type]
        if isinstance(value, torch.Tensor):
            return value.double()
        return torch.tensor(float(value), device="cpu")  # type: ignore[arg-type]

    def error(self, value: object) -> torch.Tensor:
        """The honest error of each element.

        What equals its exact value was never rounded: data, masks, positions and whole numbers are the same in every
        run. A zero may be a value that relu cut off, unless the data that move leave it zero.
        """
        exact = self.exact(value)
        if not isinstance(value, torch.Tensor) or not has_companions(value):
            return torch.zeros_like(exact)
        error = doubt(value, self._store, self._store.of(value).unit, FLOOR) * self._typical
        same = (value.detach().double() == exact) & ((exact != 0) | (self._store.moved(value) == 0))
        return torch.where(same, 0.0, error)


def _turned(gaps: torch.Tensor, errors: torch.Tensor) -> int:
    """Return how many gaps an honest error closes."""
    return int(((gaps <= errors) & (errors > 0)).sum())


def _terms(call: Call, inputs: list[torch.Tensor]) -> int:
    """The length of the longest sum of one op."""
    first = inputs[0]
    match call.traits.terms:
        case "last":
            return max(t.shape[-1] for t in inputs)
        case "dim":
            return first.shape[call.args[1]] if first.dim() else 1
        case "heads":
            return max(first.shape[-2:])
        case "kernel":
            return max(1, inputs[1].numel() // inputs[1].shape[0])
    results = [t.numel() for t in leaves(call.out) if has_companions(t) and t.numel()]
    return max(t.numel() for t in inputs) // min(results) if results and not call.moves else 1


def _to_kink(call: Call, known: _Known, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how far each element lies from where a derivative jumps, and how far an honest error may move it."""
    exact, errors = known.exact(value), known.error(value)
    if call.traits.kink == "zero":
        return exact.abs(), errors
    sizes, aligned = call.args[1].shape[:1:-1], call.args[5]
    scale = (torch.tensor(sizes, dtype=torch.float64, device=exact.device) - int(aligned)) / 2
    pixels = (exact + 1) * scale - (0.0 if aligned else 0.5)
    return (pixels - pixels.round()).abs(), errors * scale


_Near = Callable[[Call, _Known], "tuple[torch.Tensor, torch.Tensor]"]
"""Gives how far each decision of an op lies from a tie, and how far an honest error may move it."""


def _between(call: Call, known: _Known) -> tuple[torch.Tensor, torch.Tensor]:
    """Between the two sides of a comparison."""
    left, right = call.args[:2]
    gaps = (known.exact(left) - known.exact(right)).abs()
    return gaps, (known.error(left) + known.error(right)).expand(gaps.shape)


def _runner_up(call: Call, known: _Known) -> tuple[torch.Tensor, torch.Tensor]:
    """Between neighbours of the values in their order, of which only those that decide count."""
    exact, errors = known.exact(call.args[0]), known.error(call.args[0])
    if call.name in ("max", "min", "median") and isinstance(call.out, torch.Tensor):
        return exact.new_empty(0), exact.new_empty(0)  # no index is taken
    dim = call.argument("dim", -1)
    flat = dim is None or not exact.dim()
    exact, errors = (t.reshape(-1) if flat else t.movedim(dim, -1) for t in (exact, errors))
    ordered, order = exact.sort(-1, descending=call.name not in ("argmin", "min"))
    errors = errors.gather(-1, order)
    if call.traits.decides in ("best", "extreme"):
        ordered, errors = ordered[..., :2], errors[..., :2]
    elif call.name == "topk":
        ordered, errors = (t[..., : call.args[1] + 1] for t in (ordered, errors))
    return ordered.diff(dim=-1).abs(), torch.maximum(errors[..., 1:], errors[..., :-1])


def _to_integer(call: Call, known: _Known) -> tuple[torch.Tensor, torch.Tensor]:
    """To the next integer, or half of one; of a quotient, where one is taken."""
    exact, errors = known.exact(call.args[0]), known.error(call.args[0])
    if call.traits.decides == "quotient":
        divisor = known.exact(call.args[1])
        exact = exact / divisor
        errors = (errors + exact.abs() * known.error(call.args[1])) / divisor.abs()
    gaps = (exact - exact.round()).abs() if call.name != "round" else ((exact % 1) - 0.5).abs()
    return gaps, errors.expand(gaps.shape)


def _cast(call: Call, known: _Known) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = call.kwargs.get("dtype")
    whole = dtype is not None and not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool
    return _to_integer(call, known) if whole else (torch.empty(0, device="cpu"),) * 2


def _edges(call: Call, known: _Known) -> tuple[torch.Tensor, torch.Tensor]:
    """To the nearest edge of a bucket."""
    edges, values = call.args[:2] if call.name == "searchsorted" else call.args[1::-1]
    exact = known.exact(edges).reshape(1, -1)
    if not exact.numel():
        return exact.new_empty(0), exact.new_empty(0)
    gaps, nearest = (known.exact(values).reshape(-1, 1) - exact).abs().min(1)
    return gaps, known.error(values).reshape(-1) + known.error(edges).reshape(-1)[nearest]


_GAPS: Mapping[str, _Near] = {  # by what is decided, see `Traits`
    "order": _between,
    **dict.fromkeys(("best", "extreme", "selection"), _runner_up),
    **dict.fromkeys(("integer", "quotient"), _to_integer),
    "bin": _edges,
    "cast": _cast,
}
