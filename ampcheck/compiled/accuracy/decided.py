"""What other roundings may decide otherwise in a run, and how long its sums are: freedom that compiled code has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ampcheck.shadow import Shadow
from ampcheck.shadow.bounds import FLOOR
from ampcheck.shadow.call import Call, leaves, op_schema
from ampcheck.shadow.companions import MOVE, has_companions
from ampcheck.shadow.compare import Result, result_of

_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "addmv", "mv", "dot"))
_KINKS = frozenset(("threshold_backward", "leaky_relu_backward", "hardtanh_backward", "sgn", "sign", "abs"))
"""Ops whose derivative jumps at zero of their last floating input."""


@dataclass(frozen=True, slots=True)
class Freedom:
    """What honest runs may decide otherwise.

    near_ties: decisions that an honest error turns, and decided: all decisions, of the op with the most of them by
    share. kinks: the share of elements that lie as near to where a derivative jumps; kinked: all elements of the op
    with the fewest of them, 0 where no derivative jumps.
    """

    near_ties: int = 0
    decided: int = 1
    kinks: float = 0.0
    kinked: int = 0

    def kinks_at(self, step: int) -> float:
        """The share of elements on whose side of a kink honest runs differ. After an update runs that differ by less
        than all bounds may differ on a few elements."""
        return self.kinks + (4 / self.kinked if step and self.kinked else 0.0)

    @property
    def share(self) -> float:
        """The share of decisions that an honest error turns."""
        return self.near_ties / self.decided


class DecisionWatch(TorchDispatchMode):
    """Measures the freedom of a shadowed run; entered inside of its `Shadow`. terms: of the longest sum so far."""

    supports_higher_order_operators = True

    def __init__(self, shadow: Shadow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.freedom = Freedom()
        self.shadow = shadow
        self.terms = 1
        self._roundings: dict[int, int] = {}

    def result(self, tensor: torch.Tensor) -> Result:
        """A tensor of the run with its companions."""
        roundings = self._roundings.get(tensor.untyped_storage()._cdata, 0)
        return replace(result_of(self.shadow, tensor), terms=self.terms, roundings=roundings)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload) and not op_schema(func).view:
            with _disable_current_modes(), torch.no_grad():
                self._see(Call(func, op_schema(func), args, kwargs or {}, out))
        return out

    def _see(self, call: Call) -> None:
        call.inputs = [t for t in leaves((call.args, tuple(call.kwargs.values()))) if has_companions(t) and t.numel()]
        if not call.inputs:
            return
        self.terms = max(self.terms, _terms(call))
        self._count(call)
        near = _GAPS.get(call.name)
        if call.name in _KINKS:
            exact = self.shadow.exact(call.inputs[-1]).abs().double()
            share = 2 * self._turned(exact[exact > 0], call.inputs[-1:], exact) / exact.numel()
            kinked = min(exact.numel(), self.freedom.kinked or exact.numel())
            self.freedom = replace(self.freedom, kinks=max(self.freedom.kinks, share), kinked=kinked)
        elif near is not None:
            sides = [self.shadow.exact(t).double() for t in call.inputs]
            gaps = near(call, sides)
            turned = self._turned(gaps, call.inputs, sides[0])
            if turned / max(1, gaps.numel()) > self.freedom.share:
                self.freedom = replace(self.freedom, near_ties=turned, decided=gaps.numel())

    def _count(self, call: Call) -> None:
        """Count the roundings in a row that results have behind them."""
        before = max(self._roundings.get(t.untyped_storage()._cdata, 0) for t in call.inputs)
        for tensor in leaves(call.out):
            if has_companions(tensor):
                rounds = tensor.dtype.itemsize <= 2 and not call.schema.moves
                self._roundings[tensor.untyped_storage()._cdata] = before + rounds

    def _turned(self, gaps: torch.Tensor, sources: list[torch.Tensor], exact: torch.Tensor) -> int:
        """How many gaps an honest error closes."""
        known = exact[exact.isfinite()]
        typical = float(known.square().mean().sqrt()) if known.numel() else 0.0
        doubt = 0.0
        for tensor in sources:
            reference = self.shadow.reference(tensor)
            apart = (reference.moved - reference.exact).nan_to_num(0.0, 0.0, 0.0)
            size = float(torch.linalg.vector_norm(reference.exact.nan_to_num(0.0, 0.0, 0.0)))
            spread = float(torch.linalg.vector_norm(apart)) / max(size, 1e-300)
            doubt += (spread / MOVE + FLOOR) * reference.unit
        return int((gaps <= doubt * typical).sum())


def _terms(call: Call) -> int:
    """The length of the longest sum of one op."""
    name, first = call.name, call.inputs[0]
    if name in _PRODUCTS:
        return max(t.shape[-1] for t in call.inputs)
    if name in ("_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp"):
        return first.shape[call.args[1]] if first.dim() else 1
    if "attention" in name:
        return max(first.shape[-2:])
    if name == "convolution":
        return max(1, call.inputs[1].numel() // call.inputs[1].shape[0])
    results = [t.numel() for t in leaves(call.out) if has_companions(t) and t.numel()]
    return max(t.numel() for t in call.inputs) // min(results) if results and not call.schema.moves else 1


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
