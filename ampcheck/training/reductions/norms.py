"""Norms of norms, op by op: how a total norm was put together, in which format, and what it should be."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ampcheck.core.formats import format_of
from ampcheck.core.run import Where
from ampcheck.facts.store import StorageMap
from ampcheck.records.reductions import NormStats
from ampcheck.stream.ops import OpEvent, leaves


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm, or its power.

    low: it is a total of several, rounded to at most 16 bits. done: nothing is added to it any more. noted: as a total,
    which it is no longer where it is summed over processes.
    """

    exact: float
    order: float
    power: bool = False
    terms: int = 1
    low: bool = False
    grouped: bool = False
    sharded: bool = False
    done: bool = True
    noted: NormStats | None = None


class NormWatch:
    """Follows norms from op to op. Of a sharded tensor that of the local part is followed, and the sums over processes
    of its powers. any: whether there are norms in this step."""

    def __init__(self) -> None:
        self.totals: list[NormStats] = []
        self.any = False
        self._norms = StorageMap[dict[int, tuple[_Norm, ...]]]()  # by offset

    def forget(self) -> None:
        """Drop the norms of the step before."""
        self._norms.clear()
        self.any = False

    def see(self, call: OpEvent) -> None:
        """Look at an op that ran. What is no norm, and was not computed from one, is left alone."""
        base = call.name.rpartition("::")[2].removesuffix("_")
        if base in ("linalg_vector_norm", "norm", "_foreach_norm"):
            order = call.argument("ord", call.argument("p", 2))
            tensors = call.args[0] if base == "_foreach_norm" else [call.args[0]]
            for tensor, result in zip(tensors, leaves(call.out), strict=False):
                self._norm_of(tensor, order, result, call)
        elif not len(self._norms):
            return
        elif base in ("stack", "cat"):
            parts = [self._of(tensor) for tensor in call.args[0]]
            if all(parts):
                self._keep(call.out, tuple(norm for part in parts for norm in part))
        elif call.args:
            self._power(base, call)

    def _norm_of(self, tensor: torch.Tensor, order: Any, out: torch.Tensor, call: OpEvent) -> None:
        order = 2.0 if order is None else order
        if out.numel() != 1 or not isinstance(order, (int, float)) or not 0 < order < math.inf:
            return  # the largest magnitude is exact in every format
        norms = self._of(tensor)
        if norms and not any(norm.power or norm.order != order for norm in norms):
            total = _together(norms, out)
            if len(norms) > 1:
                total = replace(total, noted=self._total(total, out, call, len(norms)))
            self._keep(out, (total,))
        elif tensor.is_floating_point():  # a shard without elements, too: the other ranks have their parts
            wide = torch.float64 if tensor.device.type != "mps" else torch.float32
            exact = float(torch.linalg.vector_norm(tensor.detach(), order, dtype=wide))
            self._keep(out, (_Norm(exact, float(order)),))

    def _power(self, base: str, call: OpEvent) -> None:
        first = next(iter(leaves(call.args[0])), None)
        other = call.args[1] if len(call.args) > 1 else None
        norms = self._added(first, other) if base == "add" and isinstance(other, torch.Tensor) else self._of(first)
        if not norms or first is None:
            return
        order, power = norms[0].order, all(norm.power for norm in norms)
        result = next(iter(leaves(call.out)), first)
        low = _is_low(result)
        if unchanged := _unchanged(base, other, norms):
            self._keep(result, unchanged)
            return
        squares = base == "square" or (base == "mul" and other is first)
        followed: tuple[_Norm, ...] = ()
        if (base == "pow" and other == order) or (order == 2 and not power and squares):
            followed = tuple(replace(norm, power=True) for norm in norms)
            if len(norms) == 1 and result.numel() == 1 and low and not bool(result.isfinite()):
                self._total(followed[0], result, call, norms[0].terms)
        elif base in ("sum", "add") and power and result.numel() == 1:
            followed = (_together(norms, result),)
        elif power and ((base == "sqrt" and order == 2) or (base == "pow" and other == 1 / order)):
            followed = tuple(replace(norm, power=False, done=True) for norm in norms)
            if len(norms) == 1 and norms[0].terms > 1:
                self._total(followed[0], result, call, norms[0].terms)
        elif base in ("allreduce", "all_reduce") and power:
            followed = tuple(_reduced(norm, low) for norm in norms)
        if followed:
            self._keep(result, followed)

    def _total(self, norm: _Norm, out: torch.Tensor, call: OpEvent, terms: int) -> NormStats:
        if norm.noted is not None and norm.sharded:
            self.totals = [total for total in self.totals if total is not norm.noted]
        name, value = format_of(out.dtype).name, float(out.detach())
        where = Where("update", "", "aten::linalg_vector_norm", *call.line())
        total = NormStats(name, terms, norm.grouped, value, norm.exact, norm.order, norm.sharded, where)
        self.totals.append(total)
        return total

    def _of(self, tensor: object) -> tuple[_Norm, ...]:
        norms = self._norms.get(tensor)
        return norms.get(int(tensor.storage_offset()), ()) if norms and isinstance(tensor, torch.Tensor) else ()

    def _added(self, first: object, other: object) -> tuple[_Norm, ...]:
        """The norms of two terms; none where one of them is no norm."""
        norms = self._of(first) + self._of(other)
        return norms if len(norms) == 2 else ()

    def _keep(self, tensor: torch.Tensor, norms: tuple[_Norm, ...]) -> None:
        self.any = True
        self._norms.put(tensor, {**(self._norms.get(tensor) or {}), int(tensor.storage_offset()): norms})


def _reduced(norm: _Norm, low: bool) -> _Norm:
    """The norm after a collective has summed it over ranks, in 16 bits if `low`."""
    low = norm.low or low
    return replace(norm, terms=norm.terms + 1, low=low, grouped=norm.grouped or low, sharded=True)


def _unchanged(base: str, other: Any, norms: tuple[_Norm, ...]) -> tuple[_Norm, ...]:
    """The norms after an op that copies them or adds an eps, in 2.9 before the sum over processes; none of others."""
    if base in ("_to_copy", "clone", "wait_tensor", "_wrap_tensor_autograd") or (base == "add" and other == 0):
        return norms
    if base == "add" and isinstance(other, float) and not all(norm.power for norm in norms):
        return tuple(replace(norm, exact=norm.exact + other) for norm in norms)
    return ()


def _together(norms: tuple[_Norm, ...], out: torch.Tensor) -> _Norm:
    """The total of several norms. A part that is a low total makes the outcome depend on the grouping."""
    order, power = norms[0].order, norms[0].power
    return _Norm(
        sum(norm.exact**order for norm in norms) ** (1 / order),
        order,
        power=power,
        terms=sum(norm.terms for norm in norms),
        low=(_is_low(out) and len(norms) > 1) or any(n.low for n in norms if not n.done or len(norms) == 1),
        grouped=any(norm.grouped or (norm.low and norm.done and len(norms) > 1) for norm in norms),
        sharded=any(norm.sharded for norm in norms),
        done=not power,
    )


def _is_low(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and format_of(tensor.dtype).bits <= 16
