"""Norms of norms, op by op: how a total norm was put together, in which format, and what it should be."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from ampcheck.core.formats import format_of
from ampcheck.health import Unmeasured
from ampcheck.health.values import values_of
from ampcheck.torchtools.storage import holds_first_copy, is_sharded


@dataclass(frozen=True, slots=True)
class NormStats:
    """A total norm: the norm of several norms, or the root of the sum of their powers.

    format: of the total. terms: how many norms went in. grouped: whether one of them was itself a total rounded to at
    most 16 bits, so that the outcome depends on how the tensors were grouped; across processes too. value: what was
    computed. exact: the same in float64, of which each process knows its own part where `sharded`; None where it is not
    known. order: 2 for the Euclidean norm.
    """

    format: str
    terms: int
    grouped: bool
    value: float
    exact: float | None
    order: float = 2.0
    sharded: bool = False
    file: str = ""
    line: int | None = None

    @property
    def low(self) -> bool:
        """Whether the total itself has at most 16 bits."""
        return format_of(self.format).bits <= 16

    @property
    def overflowed(self) -> bool:
        """Whether it is infinite or NaN where the exact norm is finite."""
        return self.low and not math.isfinite(self.value) and self.exact is not None and math.isfinite(self.exact)

    @property
    def error(self) -> float | None:
        """Relative to the exact norm; None where that is not known or not finite."""
        if not self.exact or not math.isfinite(self.exact):
            return None
        return abs(self.value - self.exact) / self.exact


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm, or its power.

    low: it is a total of several, rounded to at most 16 bits. done: nothing is added to it any more.
    """

    exact: float | None
    order: float
    power: bool = False
    terms: int = 1
    low: bool = False
    grouped: bool = False
    sharded: bool = False
    done: bool = True


class NormWatch:
    """Follows norms by what names their values; see `ReductionWatch.key`."""

    def __init__(self) -> None:
        self.totals: list[NormStats] = []
        self._norms: dict[Any, tuple[_Norm, ...]] = {}

    def forget(self, gone: Collection[int]) -> None:
        """Drop what storages held that are gone."""
        self._norms = {key: one for key, one in self._norms.items() if key[0] not in gone}

    def see(
        self,
        name: str,
        args: Any,
        kwargs: Any,
        out: Any,
        key: Callable[[Any], Any],
        place: tuple[str, int | None],
    ) -> None:
        """Look at an op that ran. What is no norm, and was not computed from one, is left alone."""
        base = name.rpartition("::")[2].partition(".")[0].removesuffix("_")
        if base in ("linalg_vector_norm", "norm"):
            order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
            self._norm_of(args[0], order, out, key, place)
        elif base == "_foreach_norm":
            order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
            for one, result in zip(args[0], out, strict=True):
                self._norm_of(one, order, result, key, place)
        elif not self._norms:
            return
        elif base in ("stack", "cat"):
            parts = [self._norms.get(key(one)) for one in args[0]]
            if all(parts):
                self._keep(key(out), tuple(norm for part in parts for norm in part or ()))
        elif base in ("pow", "sqrt", "square", "mul", "_to_copy", "clone", "sum", "add", "allreduce", "all_reduce"):
            self._power(base, args, out, key, place)

    def _norm_of(self, tensor: Any, order: Any, out: Any, key: Callable[[Any], Any], place: Any) -> None:
        if not isinstance(out, torch.Tensor) or out.numel() != 1 or not isinstance(order, (int, float, type(None))):
            return
        order = 2.0 if order is None else float(order)
        if not 0 < order < math.inf:  # the largest magnitude is exact in every format
            return
        norms = self._norms.get(key(tensor))
        if norms and not any(one.power for one in norms) and all(one.order == order for one in norms):
            made = _together(norms, out)
            if is_sharded(tensor) or any(one.sharded for one in norms):
                made = replace(made, sharded=True, grouped=made.grouped or _is_low(out))
            if len(norms) > 1 or made.sharded:
                self._total(made, out, place, len(norms))
            self._keep(key(out), (made,))
        elif tensor.is_floating_point() and tensor.numel() > 0:
            self._keep(key(out), (_Norm(_exact(tensor, order), order, sharded=is_sharded(tensor)),))

    def _power(self, base: str, args: Any, out: Any, key: Callable[[Any], Any], place: Any) -> None:
        first = args[0][0] if isinstance(args[0], (list, tuple)) and args[0] else args[0]
        norms = self._norms.get(key(first)) if isinstance(first, torch.Tensor) else None
        other = args[1] if len(args) > 1 else None
        if base == "add" and isinstance(other, torch.Tensor):
            norms = (norms or ()) + (self._norms.get(key(other)) or ())
            norms = norms if len(norms) == 2 else None
        if not norms:
            return
        order, power = norms[0].order, all(one.power for one in norms)
        result = out if isinstance(out, torch.Tensor) else first
        made: tuple[_Norm, ...] | None = None
        if base in ("_to_copy", "clone") or (base == "add" and other == 0):
            made = norms
        elif (base == "pow" and other == order) or (
            order == 2 and not power and (base == "square" or (base == "mul" and other is first))
        ):
            made = tuple(replace(one, power=True) for one in norms)
            if len(made) == 1 and result.numel() == 1 and _is_low(result) and not bool(result.isfinite()):
                self._total(made[0], result, place, made[0].terms)
        elif base in ("sum", "add") and power and result.numel() == 1:
            made = (_together(norms, result),)
        elif power and ((base == "sqrt" and order == 2) or (base == "pow" and other == 1 / order)):
            made = tuple(replace(one, power=False, done=True) for one in norms)
            if len(made) == 1 and made[0].terms > 1:
                self._total(made[0], result, place, made[0].terms)
        elif base in ("allreduce", "all_reduce") and power and len(norms) == 1:
            low = _is_low(result)
            together = replace(norms[0], low=norms[0].low or low, grouped=norms[0].grouped or norms[0].low or low)
            made = (replace(together, terms=norms[0].terms + 1, sharded=True),)
        if made is not None:
            self._keep(key(result), made)

    def _total(self, made: _Norm, out: Any, place: tuple[str, int | None], terms: int) -> None:
        plain = values_of(out)
        if isinstance(plain, Unmeasured):
            return
        value, name = float(plain.detach()), format_of(plain.dtype).name
        self.totals.append(NormStats(name, terms, made.grouped, value, made.exact, made.order, made.sharded, *place))

    def _keep(self, key: object, norms: tuple[_Norm, ...]) -> None:
        if key is not None:
            self._norms[key] = norms


def _together(norms: tuple[_Norm, ...], out: object) -> _Norm:
    """The total of several norms. A part that is a low total makes the outcome depend on the grouping."""
    order, power = norms[0].order, norms[0].power
    parts = [one.exact for one in norms]
    exact = None if any(part is None for part in parts) else sum(part**order for part in parts if part) ** (1 / order)
    return _Norm(
        exact,
        order,
        power=power,
        terms=sum(one.terms for one in norms),
        low=(_is_low(out) and len(norms) > 1) or any(one.low for one in norms if not one.done or len(norms) == 1),
        grouped=any(one.grouped or (one.low and one.done and len(norms) > 1) for one in norms),
        sharded=any(one.sharded for one in norms),
        done=not power,
    )


def _is_low(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and format_of(tensor.dtype).bits <= 16


def _exact(tensor: torch.Tensor, order: float) -> float | None:
    """The norm in float64 of what this process counts of a tensor."""
    plain = values_of(tensor)
    if isinstance(plain, Unmeasured):
        return None
    if not holds_first_copy(tensor) and hasattr(tensor, "placements"):
        return 0.0
    wide = torch.float64 if plain.device.type != "mps" else torch.float32
    return float(torch.linalg.vector_norm(plain.detach(), order, dtype=wide))
