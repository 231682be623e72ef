"""How far a value may lie from its exact companion.

A value has an honest error: what moving the data by a unit roundoff does to it (`spread`, the conditioning of the
problem), and a few roundings of its own. Both are norms over groups of elements, the rows or columns of a tensor, so that
a bad row does not hide behind the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ampcheck.shadow.companions import MOVE

SLACK = 8.0
"""Honest errors reach a few times what a sample shows: standard deviations."""

FLOOR = 4.0
"""Roundings of its own that every value may have, in unit roundoffs."""

UNKNOWABLE = 0.3
"""A relative spread beyond which the data determine nothing of a value, such as a gradient that is zero by mathematics."""

_FEW = {1: 64.0, 2: 14.0, 3: 9.0}
"""The slack of groups of so few elements that one sample of their spread may be small by chance: Student's t at 1 %."""

_GROUP = 16
"""Elements that a group has at least, where the tensor has as many."""

JUDGED_UNIT = 2.0**-12
"""Values with a coarser format in their history are judged for digits; float32 alone loses none that matter here."""


@dataclass(frozen=True, slots=True)
class Examination:
    """What became of one value.

    lost: elements that are not finite although their exact companions are; masked: all of these are negative infinities
    where exact is next to the lowest number. flagged: groups beyond their bounds, of `groups`. error, spread: relative
    norms of the worst flagged group, else of the whole. limit: the bound of that group. impact: the norm of the errors
    of flagged groups relative to the norm of exact. flushed: the share of that error which flushed to zero; zeroed:
    elements that did. emptied: the value is zero throughout.
    """

    numel: int
    lost: int = 0
    nan: int = 0
    masked: bool = False
    flagged: int = 0
    groups: int = 1
    error: float = 0.0
    spread: float = 0.0
    limit: float = 0.0
    impact: float = 0.0
    flushed: float = 0.0
    zeroed: int = 0
    emptied: bool = False

    @property
    def beyond(self) -> bool:
        """Whether the value is worse than an honest one."""
        return self.lost > 0 or self.flagged > 0


def slack_of(elements: int) -> float:
    """The slack of a group of so many elements."""
    return max(SLACK, _FEW.get(elements, 0.0))


def group_dims(shape: torch.Size) -> tuple[int, ...]:
    """The dimensions that a group spans: columns of narrow tensors (boxes, coordinates), rows of others."""
    dims = len(shape)
    if dims < 2:
        return tuple(range(dims))
    numel = shape.numel()
    if shape[-1] <= 8 and numel >= _GROUP * shape[-1]:
        return tuple(range(dims - 1))
    elements, first = 1, dims
    while first > 0 and elements < _GROUP:
        first -= 1
        elements *= shape[first]
    return tuple(range(first, dims))


def is_within(value: torch.Tensor, exact: torch.Tensor, moved: torch.Tensor, unit: float) -> bool:
    """A fast look in float32: whether every group is within its bound. Whether a value that is not is at fault, and how,
    `examine` decides."""
    if unit < JUDGED_UNIT:
        return bool(value.sum().isfinite())
    dims = group_dims(value.shape)
    reference = exact.to(torch.float32)
    size = torch.linalg.vector_norm(reference, dim=dims)
    error = torch.linalg.vector_norm(value - reference if value.dtype is torch.float32 else value.float() - reference, dim=dims)
    spread = torch.linalg.vector_norm(moved - reference, dim=dims)
    bound = spread.mul_(SLACK * unit / MOVE).add_(size, alpha=SLACK * FLOOR * unit)
    return bool((error <= bound).all())  # a NaN is not within


def examine(
    value: torch.Tensor, exact: torch.Tensor, moved: torch.Tensor, unit: float, flushes_at: float
) -> Examination:
    """Compare a value with its companions in float64. flushes_at: the largest magnitude that its format flushes."""
    if value.is_complex():
        value, exact, moved = (torch.view_as_real(t.resolve_conj()) for t in (value, exact, moved))
    wide, moved = value.double(), moved.double()
    finite, known = wide.isfinite(), exact.isfinite()
    lost_here = ~finite & known
    lost = int(lost_here.sum())
    masked = False
    if lost:
        low = exact[lost_here]
        masked = bool((wide[lost_here] == -torch.inf).all()) and bool((low <= -(2.0**14)).all()) and not wide.isnan().any()
    both = finite & known
    difference = torch.where(both, wide - exact, 0.0)
    reference = torch.where(both, exact, 0.0)
    apart = torch.where(both & moved.isfinite(), moved - exact, 0.0) * (unit / MOVE)
    dims = group_dims(value.shape)
    norms = [torch.linalg.vector_norm(t, dim=dims).reshape(-1) for t in (reference, difference, apart)]
    size, error, spread = norms
    elements = max(1, value.numel() // max(1, size.numel()))
    bound = slack_of(elements) * (spread + FLOOR * unit * size)
    flags = (error > bound) & (spread <= UNKNOWABLE * size)
    if unit < JUDGED_UNIT:
        flags = torch.zeros_like(flags)
    whole = float(torch.linalg.vector_norm(size))
    flagged = int(flags.sum())
    nan = int(wide.isnan().sum())
    if not flagged:
        ratio = [float(torch.linalg.vector_norm(n)) / max(whole, 1e-300) for n in (error, spread)]
        return Examination(value.numel(), lost, nan, masked, 0, size.numel(), *ratio)
    worst = int(torch.where(flags, error / size.clamp_min(1e-300), -1.0).argmax())
    scale = max(float(size[worst]), 1e-300)
    shape = [1 if d in dims else n for d, n in enumerate(value.shape)]
    in_flagged = flags.reshape(shape).expand(value.shape) if value.dim() else flags.reshape(())
    gone = in_flagged & (wide == 0) & (exact != 0) & (exact.abs() <= flushes_at)
    wrong = float(torch.linalg.vector_norm(torch.where(in_flagged, difference, 0.0)))
    flushed = float(torch.linalg.vector_norm(torch.where(gone, exact, 0.0)))
    return Examination(
        value.numel(),
        lost,
        nan,
        masked,
        flagged,
        size.numel(),
        float(error[worst]) / scale,
        float(spread[worst]) / scale,
        float(bound[worst]) / scale,
        wrong / max(whole, 1e-300),
        flushed / max(wrong, 1e-300),
        int(gone.sum()),
        not bool(wide.any()),
    )
