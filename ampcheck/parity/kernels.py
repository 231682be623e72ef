"""Kernels that cannot be followed inside, beside the exact values of the other side, which computes the same in
PyTorch.

A kernel is given the values of the run as they are, so its bound is that of one op: a rounding of its result, one
inside, and of each value before it what was rounded on the way there. The usual slack of 8 does not see sums that are
kept in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ampcheck.core.run import Where
from ampcheck.facts.memory import has_companions, roundoff
from ampcheck.facts.norms import finite_parts, group_norms, norm, ratio, real_parts
from ampcheck.parity.trail import Record, is_opaque
from ampcheck.records.parity import KernelResult
from ampcheck.records.results import JUDGED_UNIT, MOVE, SLACK
from ampcheck.shadow.bounds import group_dims, slack_of
from ampcheck.shadow.call import Call
from ampcheck.shadow.independent import ObservedShadow
from ampcheck.shadow.result import Reference

_ROUNDINGS = 2.0
"""Honest error of a kernel in unit roundoffs of its result: one of its own, one inside."""

_ELEMENT = 8.0
"""Bound of the error of one element, in root mean squares of the honest error of its row: the error of one wrong
element is little beside a long row."""

_SUMS = 4.0
"""The slack of sums in float32, in standard deviations of their roundings in any order."""

_FLUSHED = float(torch.finfo(torch.float32).tiny)
"""Bound below which devices flush to zero: the subnormal numbers of float32, which are those of bfloat16 too."""

_MANY = 256
"""Elements from which the error of a result in one direction says something."""

_LIKE = 0.5
"""The relative distance up to which a value of the reference is taken for that which a kernel computes."""


class KernelJudge:
    """Judges what opaque ops return by the reference, and lets its exact values take the place of their results.

    records: of the reference, with the values of the shapes that kernels return kept. unmatched: ops of which the
    reference has no value.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._kept: dict[torch.Size, list[Record]] = {}
        for record in records:
            if record.kept is not None and record.where is not None:
                self._kept.setdefault(record.shape, []).append(record)
        self.judged: list[KernelResult] = []
        self.unmatched: list[Where] = []

    def begin(self) -> None:
        """Forget what an earlier run gave."""
        self.judged.clear()
        self.unmatched.clear()

    def __call__(self, call: Call, shadow: ObservedShadow) -> None:
        """Judge the results of an op that cannot be followed, and go on from the exact values of the reference."""
        if not is_opaque(call):
            return
        depth = max((companions.depth for companions in call.before), default=0)
        for tensor in (*call.fresh, *call.written):
            if not has_companions(tensor) or not tensor.numel():
                continue
            reference = self._nearest(tensor)
            if reference is None:
                self.unmatched.append(call.where)
                continue
            message, error, limit = compare_kernel(tensor, reference, depth)
            self.judged.append(KernelResult(call.where, call.traits.title, message, error, limit))
            shadow.store.to_write(tensor)
            shadow.store.write(tensor, reference.exact, reference.moved)

    def _nearest(self, tensor: torch.Tensor) -> Reference | None:
        """The companions of the value of the reference that is nearest to a result."""
        best, least = None, _LIKE
        for record in self._kept.get(tensor.shape, ()):
            assert record.kept is not None
            exact = record.kept[1].exact
            if exact.is_complex() != tensor.is_complex():
                continue
            away = ratio(finite_parts(tensor).to(exact.dtype) - finite_parts(exact), finite_parts(exact))
            if away < least:
                best, least = record.kept[1], away
        return best


def compare_kernel(
    value: torch.Tensor, reference: Reference, depth: int = 0, terms: int = 1
) -> tuple[str, float, float]:
    """Return how far a result of a kernel is beyond its bound, in words and in roundings, with the bound; "" where it
    is not.

    depth: roundings to 16 bits of what it was given. terms: of its longest sum, which float32 shows in a result.
    """
    unit = roundoff(value.dtype)
    real, exact, moved = (real_parts(t).double() for t in (value, reference.exact, reference.moved))
    infinite = ~exact.isfinite()
    largest = torch.finfo(value.dtype).max if not value.is_complex() else torch.inf
    misplaced = (real.isfinite() & infinite) | (~real.isfinite() & ~infinite & (exact.abs() < largest))
    other = real.isinf() & exact.isinf() & (real != exact)
    misplaced |= other | (real.isnan() & exact.isinf()) | (real.isinf() & exact.isnan())
    if bool(misplaced.any()):
        return (
            f"{int(misplaced.sum()):,} of {real.numel():,} elements are inf or NaN where the reference is not, or the "
            "other way round",
            math.inf,
            0.0,
        )
    both = real.isfinite() & exact.isfinite() & moved.isfinite()
    real, exact, moved = (torch.where(both, t, 0.0) for t in (real, exact, moved))
    dims = group_dims(real.shape)
    off, size, spread = (group_norms(t, dims) for t in (real - exact, exact, (moved - exact) * (unit / MOVE)))
    spread = torch.maximum(spread, min(ratio(spread, size), 1.0) * size)  # one sample is small by chance in some rows
    few = slack_of(real.numel() // off.numel()) / SLACK  # one sample of one element says least
    sums = _SUMS * math.sqrt(terms) if unit < JUDGED_UNIT else 0.0
    roundings = _ROUNDINGS + math.sqrt(depth) + sums
    honest = (1 + math.sqrt(depth)) * few * spread + roundings * unit * size
    smallest = max(torch.finfo(value.dtype).tiny * unit, _FLUSHED)
    bound = honest + smallest * math.sqrt(real.numel() / off.numel())
    error, limit = _in_roundings(off, size, unit), _in_roundings(bound, size, unit)
    worst = int((off / bound).argmax())
    figures = float(error[worst]), float(limit[worst])
    beyond = off > bound
    if bool(beyond.any()):
        rows = f"{int(beyond.sum()):,} of {beyond.numel():,} rows" if beyond.numel() > 1 else "the result"
        return f"{rows} with an error of up to {figures[0]:.3g} roundings, limit {figures[1]:.3g}", *figures
    typical = honest.reshape([1 if d in dims else n for d, n in enumerate(real.shape)])
    typical = typical / math.sqrt(real.numel() / off.numel())
    flushed = smallest * math.sqrt(real.numel()) / (unit * max(norm(exact), 1e-300))
    if bias := _bias(real, exact, moved, unit, sums + max(1.0, math.sqrt(depth)) + flushed):
        return (
            f"the whole result is off by {bias:+.3g} roundings in one direction, which no rounding to nearest is",
            *figures,
        )
    single = int(((real - exact).abs() > roundings * unit * exact.abs() + _ELEMENT * typical + 2 * smallest).sum())
    return (f"{single:,} of {real.numel():,} elements are far off" if single else ""), *figures


def _bias(real: torch.Tensor, exact: torch.Tensor, moved: torch.Tensor, unit: float, common: float) -> float:
    """The error along exact in roundings, if it is no chance: a wrong scale. 0 for an honest one.

    Roundings of the elements average out. common: those that all of them may share, such as one of a scale.
    """
    square = float(exact.square().sum())
    if real.numel() < _MANY or not square:
        return 0.0
    along, of_data = (float((t * exact).sum()) / square for t in (real - exact, (moved - exact) * (unit / MOVE)))
    honest = common + SLACK / math.sqrt(real.numel()) + SLACK * abs(of_data) / unit
    return along / unit if abs(along) > honest * unit else 0.0


def _in_roundings(norms: torch.Tensor, size: torch.Tensor, unit: float) -> torch.Tensor:
    return norms / size.clamp_min(1e-300) / unit
