"""What other roundings may decide otherwise in a run, and how long its sums are: freedom that another run has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from ampcheck.shadow.bounds import FLOOR
from ampcheck.shadow.call import Call, leaves
from ampcheck.shadow.companions import CompanionStore, has_companions
from ampcheck.shadow.decisions import doubt

_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "addmv", "mv", "dot"))
_KINKS = frozenset(("threshold_backward", "leaky_relu_backward", "hardtanh_backward", "sgn", "sign", "abs"))
"""Ops whose derivative jumps at zero of their last floating input."""


@dataclass(frozen=True, slots=True)
class Freedom:
    """What honest runs may decide otherwise.

    near_ties: decisions that an honest error turns, and decided: all decisions, of the op with the most of them by
    share. kinks: the share of elements that lie as near to where a derivative jumps; kinked: all elements of the op
    with the fewest of them, 0 where no derivative jumps. terms: of the longest sum, whose order is free.
    """

    near_ties: int = 0
    decided: int = 1
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
    if not inputs or call.schema.view:
        return freedom
    if (terms := _terms(call, inputs)) > freedom.terms:
        freedom = replace(freedom, terms=terms)
    if call.name in _KINKS:
        exact = store.exact(inputs[-1]).abs().double()
        share = 2 * _turned(exact[exact > 0], inputs[-1:], exact, store) / exact.numel()
        kinked = min(exact.numel(), freedom.kinked or exact.numel())
        return replace(freedom, kinks=max(freedom.kinks, share), kinked=kinked)
    if (near := _GAPS.get(call.name)) is not None:
        sides = [store.exact(t).double() for t in inputs]
        gaps = near(call, sides)
        turned = _turned(gaps, inputs, sides[0], store)
        if turned / max(1, gaps.numel()) > freedom.share:
            return replace(freedom, near_ties=turned, decided=gaps.numel())
    return freedom


def _turned(gaps: torch.Tensor, sources: list[torch.Tensor], exact: torch.Tensor, store: CompanionStore) -> int:
    """How many gaps an honest error closes."""
    known = exact[exact.isfinite()]
    typical = float(known.square().mean().sqrt()) if known.numel() else 0.0
    error = sum(doubt(t, store, store.of(t).unit, FLOOR) for t in sources)
    return int((gaps <= error * typical).sum())


def _terms(call: Call, inputs: list[torch.Tensor]) -> int:
    """The length of the longest sum of one op."""
    name, first = call.name, inputs[0]
    if name in _PRODUCTS:
        return max(t.shape[-1] for t in inputs)
    if name in ("_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp"):
        return first.shape[call.args[1]] if first.dim() else 1
    if "attention" in name:
        return max(first.shape[-2:])
    if name == "convolution":
        return max(1, inputs[1].numel() // inputs[1].shape[0])
    results = [t.numel() for t in leaves(call.out) if has_companions(t) and t.numel()]
    return max(t.numel() for t in inputs) // min(results) if results and not call.moves else 1


_Gaps = Callable[[Call, "list[torch.Tensor]"], torch.Tensor]


def _between(call: Call, exact: list[torch.Tensor]) -> torch.Tensor:
    """Between the two sides of a comparison."""
    other = exact[1] if len(exact) > 1 else call.args[1]
    return (exact[0] - other).abs()


def _runner_up(call: Call, exact: list[torch.Tensor]) -> torch.Tensor:
    """Between neighbours of the values in their order, of which only those that decide count."""
    if call.name in ("max", "min", "median") and isinstance(call.out, torch.Tensor):
        return exact[0].new_empty(0)  # no index is taken
    dim = call.argument("dim", -1)
    x = exact[0].reshape(-1) if dim is None or not exact[0].dim() else exact[0].movedim(dim, -1)
    ordered = x.sort(-1, descending=call.name not in ("argmin", "min")).values
    if call.name in ("argmax", "argmin", "max", "min"):
        ordered = ordered[..., :2]
    elif call.name == "topk":
        ordered = ordered[..., : call.args[1] + 1]
    return ordered.diff(dim=-1).abs()


def _to_integer(call: Call, exact: list[torch.Tensor]) -> torch.Tensor:
    """To the next integer, or half of one."""
    return (exact[0] - exact[0].round()).abs() if call.name != "round" else ((exact[0] % 1) - 0.5).abs()


def _cast(call: Call, exact: list[torch.Tensor]) -> torch.Tensor:
    dtype = call.kwargs.get("dtype")
    whole = dtype is not None and not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool
    return _to_integer(call, exact) if whole else exact[0].new_empty(0)


def _edges(call: Call, exact: list[torch.Tensor]) -> torch.Tensor:
    """To the nearest edge of a bucket."""
    first, second = (v.double() if isinstance(v, torch.Tensor) else torch.tensor(float(v)) for v in call.args[:2])
    edges, values = (first, second) if call.name == "searchsorted" else (second, first)
    return (values.reshape(-1, 1) - edges.reshape(1, -1)).abs().amin(1) if edges.numel() else values.new_empty(0)


_GAPS: Mapping[str, _Gaps] = {
    **dict.fromkeys(("lt", "le", "gt", "ge"), _between),
    **dict.fromkeys(("argmax", "argmin", "topk", "sort", "max", "min", "median", "kthvalue"), _runner_up),
    **dict.fromkeys(("floor", "ceil", "round", "trunc", "floor_divide"), _to_integer),
    **dict.fromkeys(("searchsorted", "bucketize"), _edges),
    "_to_copy": _cast,
}
