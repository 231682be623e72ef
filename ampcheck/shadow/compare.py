"""Compare what another run of the same call gave, such as compiled code, with what the shadowed run gave.

Not with the values of the shadowed run but with its exact ones: other roundings than those of eager mode are no fault.
What is beyond its bound in eager mode as well is a fault of eager mode, unless the other run is far worse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.shadow.bounds import FLOOR, JUDGED_UNIT, SLACK, UNKNOWABLE, Examination, examine
from ampcheck.shadow.companions import has_companions, roundoff
from ampcheck.shadow.mode import Shadow
from ampcheck.shadow.reference import Reference

Key: TypeAlias = tuple[str, str, int]
"""What a result is: kind (`output`, `loss`, `gradient`, `update`, `buffer`), name, number of the call."""

WHOLE = frozenset(("gradient", "update"))
"""Kinds that are judged as one group: their rows flip with the kinks of forward."""


@dataclass(frozen=True, slots=True)
class Result:
    """One result of the shadowed run.

    reference: None for integers, which have no companions. terms: of the longest sum that it was made with, whose order
    is free: float32 shows it, and no format of 16 bits. roundings: to 16 bits in a row, at the most.
    """

    value: torch.Tensor = field(repr=False)
    reference: Reference | None = field(repr=False)
    terms: int = 1
    roundings: int = 8

    @property
    def nbytes(self) -> int:
        """The memory of the value and its companions."""
        known = () if self.reference is None else (self.reference.exact, self.reference.moved)
        return self.value.nbytes + sum(tensor.nbytes for tensor in known)


@dataclass(frozen=True, slots=True)
class ResultError:
    """How far another run lies from the exact value of one result.

    eager, other: both runs, examined alike; unit, floor: what they were judged by. eager_error, error,
    apart: the norms of the errors of the two runs and of their difference, relative to the norm of exact; of integers,
    the share of elements that differ. share: the norm of the error over that of all results of this kind in this call.
    lost: elements that are inf or NaN, or not, unlike those of exact and of eager mode; hidden: elements that are inf
    or NaN in eager mode alone; nan: NaN in exact and in the other run alike. judged: elements of which something is
    known. absent: the other run gave no such result, or one of another shape. beyond: the other run is at fault.
    """

    key: Key
    dtype: str
    numel: int
    eager: Examination
    other: Examination
    unit: float = 0.0
    floor: float = FLOOR
    eager_error: float = 0.0
    error: float = 0.0
    apart: float = 0.0
    share: float = 0.0
    lost: int = 0
    hidden: int = 0
    nan: int = 0
    judged: int = 0
    absent: bool = False
    beyond: bool = False

    @property
    def kind(self) -> str:
        """The first of its key."""
        return self.key[0]

    @property
    def name(self) -> str:
        """The second of its key."""
        return self.key[1]

    @property
    def step(self) -> int:
        """The number of the call."""
        return self.key[2]

    @property
    def limit(self) -> float:
        """The largest error that the other run may have; of a group that is beyond, its own."""
        return self.other.limit or SLACK * (self.other.spread + self.floor * self.unit)

    @property
    def noise(self) -> bool:
        """Whether the data determine nothing of the result: a gradient that is zero by mathematics."""
        return self.other.spread > UNKNOWABLE

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".strip() + (f" at step {self.step}" if self.step else "")


def result_of(shadow: Shadow, tensor: torch.Tensor) -> Result:
    """Copies of the present values of a tensor of the shadowed run, and of its companions."""
    with _disable_current_modes():
        value = tensor.detach().clone()
    return Result(value, shadow.reference(tensor) if has_companions(tensor) else None)


def compare_results(results: Mapping[Key, Result], values: Mapping[Key, torch.Tensor]) -> tuple[ResultError, ...]:
    """Compare the values of another run with the results of the shadowed run, in their order.

    Gradients have the same loss scale in both runs; what is small beside all gradients of a call together is no error.
    """
    total: dict[tuple[str, int], float] = {}
    for (kind, _, step), result in results.items():
        if result.reference is not None:
            total[kind, step] = math.hypot(total.get((kind, step), 0.0), _norm(result.reference.exact))
    return tuple(
        _compare(key, result, values.get(key), total.get((key[0], key[2]), 0.0)) for key, result in results.items()
    )


def _compare(key: Key, result: Result, value: torch.Tensor | None, total: float) -> ResultError:
    eager, reference = result.value, result.reference
    numel, nothing = eager.numel(), Examination(eager.numel())
    plain = ResultError(key, str(eager.dtype).removeprefix("torch."), numel, nothing, nothing, judged=numel)
    if value is None or value.shape != eager.shape or (reference is None) == has_companions(value):
        return replace(plain, error=math.inf, apart=math.inf, share=math.inf, absent=True, beyond=True)
    if reference is None:
        apart = float((value != eager).double().mean()) if numel else 0.0
        return replace(plain, error=apart, apart=apart, beyond=apart > 0)
    unit = max(reference.unit, roundoff(value.dtype))
    floor = FLOOR
    if unit < JUDGED_UNIT:
        unit *= 1 + math.sqrt(result.terms) / 12
    elif key[0] not in WHOLE:
        floor = min(FLOOR, 0.25 + result.roundings / 2)
    seen, before = (_examine(v, reference, unit, floor, key[0] in WHOLE) for v in (value, eager))
    exact, mine, eagers = _real(reference.exact), _real(value).double(), _real(eager).double()
    form = format_of(eager.dtype if not eager.is_complex() else torch.float32)
    wrong = ~_alike(mine, exact) & _alike(eagers, exact) & ~_at_the_edge(mine, exact, form, unit)
    hidden = ~_alike(eagers, exact) & _alike(mine, exact)
    known = _alike(mine, exact) & ~exact.isnan()
    both = mine.isfinite() & eagers.isfinite() & exact.isfinite()
    errors = [torch.where(both, a - b, 0.0) for a, b in ((eagers, exact), (mine, exact), (mine, eagers))]
    norms = [_norm(error) for error in errors]
    size = _norm(torch.where(both, exact, 0.0)) or total or 1.0
    lost, share = int(wrong.sum()), norms[1] / (total or 1.0)
    worse = seen.flagged > 0 and not (before.flagged > 0 and seen.impact <= SLACK * before.impact)
    if key[0] == "gradient":
        beside = total > 2 * _norm(exact)  # there are others, beside which what is noise must stay small
        noise = beside and seen.spread > UNKNOWABLE and share > SLACK * max(norms[0] / total, FLOOR * unit)
        worse = noise or (worse and share > FLOOR * unit)
    return replace(
        plain,
        eager=before,
        other=seen,
        unit=unit,
        floor=floor,
        eager_error=norms[0] / size,
        error=norms[1] / size,
        apart=norms[2] / size,
        share=share,
        lost=lost,
        hidden=int(hidden.sum()),
        nan=int((exact.isnan() & mine.isnan()).sum()),
        judged=int(known.sum()),
        beyond=lost > 0 or worse,
    )


def _examine(value: torch.Tensor, reference: Reference, unit: float, floor: float, whole: bool) -> Examination:
    form = format_of(torch.float32 if value.is_complex() else value.dtype)
    exact, moved = reference.exact, reference.moved
    with torch.no_grad():
        return examine(value.detach(), exact, moved, unit, form=form, whole=whole, floor=floor, digits=True)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _alike(value: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Elements that are finite, NaN, or infinite with one sign on both sides."""
    both = value.isfinite() & exact.isfinite()
    return both | (value.isnan() & exact.isnan()) | (value.isinf() & (value == exact))


def _at_the_edge(value: torch.Tensor, exact: torch.Tensor, form: FloatFormat, unit: float) -> torch.Tensor:
    """Infinities of what an honest error takes beyond the largest number."""
    return value.isinf() & (value.sign() == exact.sign()) & (exact.abs() >= form.max * (1 - SLACK * FLOOR * unit))


def _norm(tensor: torch.Tensor) -> float:
    """The Euclidean norm of what is finite."""
    real = _real(tensor).double()
    return float(torch.linalg.vector_norm(torch.where(real.isfinite(), real, 0.0)))
