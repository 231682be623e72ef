"""Bounds of the distance of a value from its exact companion.

A value has an honest error: what moving the data by a unit roundoff does to it (`spread`, the conditioning of the
problem), and a few roundings of its own. Both are norms over groups of elements, the rows or columns of a tensor, so
that a bad row does not hide behind the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.records.results import FLOOR, JUDGED_UNIT, MOVE, SLACK, UNKNOWABLE, Examination, is_chance

_SHALLOW_FLOOR = 1.0
"""The honest error of a value that was rounded once or a few times, in unit roundoffs."""

_ILL = 0.5
"""The bound of a value, relative to it, from which less than one bit of it is required to be right."""

_LOST_VALUE_ERROR = 0.25
"""The relative error of a value from which less than two bits of it are right."""

_SATURATION_FACTOR = 1.25
"""The magnitude, in units of the largest number of a format, from which a cast that saturates loses values. Block
scales that are powers of two leave values up to 1.14 times that number, which lose no more than rounding takes."""

_FEW = {1: 64.0, 2: 14.0, 3: 9.0}
"""The slack of groups of so few elements that one sample of their spread may be small by chance: Student's t at 1 %."""

_GROUP = 16
"""Elements that a group has at least, where the tensor has as many."""

_CHUNK_ELEMENTS = 1 << 19
"""Elements of a large value that are looked at together."""

SIXTEEN = 2.0**-8
"""The coarsest unit roundoff of 16 bits: data that move by it, and not by one of 8 bits, say whether a value that is
zero is determined."""


def slack_of(elements: int) -> float:
    """The slack of a group of so many elements."""
    return max(SLACK, _FEW.get(elements, 0.0))


@cache
def floor_of(depth: int) -> float:
    """The honest error, in unit roundoffs, of a value after so many roundings in a row: they add like a random walk."""
    return min(FLOOR, max(_SHALLOW_FLOOR, 0.5 * math.sqrt(depth)))


@lru_cache(maxsize=1 << 12)
def group_dims(shape: torch.Size) -> tuple[int, ...]:
    """The dimensions that a group spans: columns of narrow tensors (boxes, coordinates), rows of others."""
    dims = len(shape)
    if dims < 2:
        return tuple(range(dims))
    if _are_columns(shape):
        return tuple(range(dims - 1))
    elements, first = 1, dims
    while first > 0 and elements < _GROUP:
        first -= 1
        elements *= shape[first]
    return tuple(range(first, dims))


def _are_columns(shape: torch.Size) -> bool:
    return len(shape) > 1 and shape[-1] <= 8 and shape.numel() >= _GROUP * shape[-1]


def _pooled(spread: torch.Tensor, size: torch.Tensor) -> float:
    """The relative spread of rows. One sample is too small in some of many rows: a peaked softmax has one direction."""
    known = size > 0
    return float((spread[known] / size[known]).clamp(max=1.0).square().mean().sqrt()) if bool(known.any()) else 0.0


def _noise_bound(spread: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
    """The bound of groups that the data do not determine: of their spread, of which one sample says least, and of the
    error that another run has there."""
    known = spread > 0
    pooled = float((off[known] / spread[known]).square().mean().sqrt()) if bool(known.any()) else 0.0
    return slack_of(1) * torch.maximum(spread * max(1.0, pooled), off)


def _grouped(values: torch.Tensor, dims: tuple[int, ...], single: bool) -> torch.Tensor:
    """The norms of groups, flat."""
    return (values.abs() if single else torch.linalg.vector_norm(values, dim=dims)).reshape(-1)


class Look(NamedTuple):
    """within: the value is within its bound. emptier: more of its elements are zero than of exact. smallest, largest:
    the magnitudes of a value of 16 bits, NaN where there is one. ill: the bound excuses nearly everything."""

    within: bool
    emptier: bool = False
    largest: float = 0.0
    ill: bool = False
    smallest: float = 0.0


def look(
    value: torch.Tensor,
    exact: torch.Tensor,
    moved: torch.Tensor,
    unit: float,
    *,
    whole: bool,
    floor: float = FLOOR,
    rounds: bool = False,
    strict: bool = False,
) -> Look:
    """A fast look in float32: what seems wrong with a value; `examine` decides whether it is, and how.

    whole: take the tensor as one group. rounds: the value is exact, rounded once; only the range can harm it. strict:
    the value was made of one that is beyond its bound.
    """
    if unit < JUDGED_UNIT:
        return Look(math.isfinite(value.sum().item()))
    dims = None if whole else group_dims(value.shape)
    if value.dtype.itemsize == 1 and (bool(cut_off(value, exact).any()) or _is_flushed(exact, value.dtype, dims)):
        return Look(False)
    emptier, smallest, largest = False, 0.0, 0.0
    if value.dtype.itemsize == 2:
        bits = value.view(torch.int16).bitwise_and(0x7FFF)  # in the order of the magnitudes, and faster to compare
        smallest, largest = [end.view(value.dtype).item() for end in torch.aminmax(bits)]
        smallest = math.nan if math.isnan(largest) else smallest
        emptier = smallest == 0.0 and int(bits.count_nonzero()) < int(exact.to(torch.float32).count_nonzero())
        if rounds and smallest >= format_of(value.dtype).smallest_normal and math.isfinite(largest):
            return Look(True, False, largest, False, smallest)
    if strict and _excuses(floor * unit):
        return Look(False, emptier, largest, False, smallest)
    whole_at_once = value.numel() < 2 * _CHUNK_ELEMENTS or (dims is not None and 0 in dims)
    parts = [(value, exact, moved)] if whole_at_once else list(_parts(value, exact, moved))
    for part, _, away in parts:
        if not _is_near(part, away, dims, SLACK * floor * unit):
            break
    else:
        return Look(True, emptier, largest, False, smallest)
    looks = [_norms(part, reference, away, dims) for part, reference, away in parts]
    sizes, spreads, errors = [torch.cat([norms[i].reshape(-1) for norms in looks]) for i in range(3)]
    if dims is None:
        sizes, spreads, errors = map(torch.linalg.vector_norm, (sizes, spreads, errors))
    bounds = spreads.mul_(SLACK * unit / MOVE).add_(sizes, alpha=SLACK * floor * unit)
    within = math.isfinite(errors.sum().item()) and bool((errors <= bounds).all())  # the bound is infinite with moved
    size, bound = sizes.sum().item(), bounds.sum().item()
    ill = bound > _ILL * size and not is_chance(SLACK * unit * size / bound, value.numel())
    return Look(within, emptier, largest, ill, smallest)


def _parts(
    value: torch.Tensor, exact: torch.Tensor, moved: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A large value and its companions in parts that stay in the cache of a processor; they cut no group in two."""
    rows = max(1, len(value) * _CHUNK_ELEMENTS // value.numel())
    return zip(*(torch.split(tensor, rows) for tensor in (value, exact, moved)), strict=True)


def _is_near(value: torch.Tensor, moved: torch.Tensor, dims: tuple[int, ...] | None, share: float) -> bool:
    """Return whether each group is as near to moved as it may be to exact: by the triangle inequality it is within its
    bound.

    An error is at most the distance from moved and the spread, and bounds allow several times the spread.
    """
    error = torch.linalg.vector_norm(_difference(moved, value), dim=dims)
    size = torch.linalg.vector_norm(moved, dim=dims)
    if dims is None or not error.dim():
        return bool(error.item() <= share * size.item() < math.inf)
    return bool(0.0 <= size.mul_(share).sub_(error).min().item() < math.inf)  # NaN where both are infinite


def _norms(
    value: torch.Tensor, exact: torch.Tensor, moved: torch.Tensor, dims: tuple[int, ...] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By group: the norm of exact, the distances of moved and of the value from it."""
    reference = exact.to(torch.float32)
    pairs = (reference, moved - reference, _difference(reference, value))
    size, spread, error = (torch.linalg.vector_norm(t, dim=dims) for t in pairs)
    return size, spread, error


def _difference(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value less the float32 reference; a narrow value is converted once and written over, which is faster."""
    return value - reference if value.dtype.itemsize > 2 else value.to(torch.float32).sub_(reference)


def cut_off(value: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Values of 8 bits that are the largest of their format where exact is far larger: PyTorch's casts saturate."""
    top = format_of(value.dtype).max
    return (value.double().abs() == top) & exact.isfinite() & (exact.abs() >= _SATURATION_FACTOR * top)


def _excuses(rounding: float) -> bool:
    """Return whether roundings of 8 bits, with their slack, explain an error that leaves less than one bit: a value
    that is zero throughout would pass, whatever made it so."""
    return SLACK * rounding >= _ILL


def _is_flushed(exact: torch.Tensor, dtype: torch.dtype, dims: tuple[int, ...] | None) -> bool:
    """Return whether the subnormal numbers of a format of 8 bits take two bits from groups on the average, whose bound
    excuses more: where the values are in the range of the format, a cast takes a unit roundoff.

    A few rows that are nothing beside the others are below the format under any scale of the whole tensor.
    """
    lost, size = (torch.linalg.vector_norm(t, dim=dims) for t in (_flushed(exact, dtype), exact))
    known = size > 0
    return bool(known.any()) and float((lost[known] / size[known]).mean()) > _LOST_VALUE_ERROR


def _flushed(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what a cast of exact loses of the elements below the normal numbers of a format; zero elsewhere."""
    return torch.where(exact.abs() < format_of(dtype).smallest_normal, exact.to(dtype).double() - exact, 0.0)


def examine(
    value: torch.Tensor,
    exact: torch.Tensor,
    moved: torch.Tensor,
    unit: float,
    *,
    form: FloatFormat,
    whole: bool,
    floor: float = FLOOR,
    digits: bool | None = None,
    single: bool = False,
    strict: bool = False,
    other: torch.Tensor | None = None,
) -> Examination:
    """Compare a value with its companions in float64.

    form: the format of the value. whole: take the tensor as one group, as gradients are. floor: see `FLOOR`. digits:
    whether to judge more than what is not finite, by default where a format coarser than float32 is in the history.
    single: take each element as a group. strict: the value was made of one that is beyond its bound: what the data do
    not determine is no excuse. other: the value in another run; what the data do not determine may be off as far.
    """
    if value.is_complex():
        value, exact, moved = (torch.view_as_real(t.resolve_conj()) for t in (value, exact, moved))
        other = torch.view_as_real(other.resolve_conj()) if other is not None else None
    wide, moved = value.double(), moved.double()
    known = exact.isfinite()
    both = wide.isfinite() & known
    difference = torch.where(both, wide - exact, 0.0)
    reference = torch.where(both, exact, 0.0)
    apart = torch.where(both & moved.isfinite(), moved - exact, 0.0) * (unit / MOVE)
    dims = tuple(range(value.dim())) if whole else () if single else group_dims(value.shape)
    size, error, spread = (_grouped(t, dims, single) for t in (reference, difference, apart))
    bound, spread, known_well = _bounds(value, exact, (size, spread), unit, floor, dims, single=single, strict=strict)
    flags = (error > bound) & known_well
    if other is not None:
        off = _grouped(torch.where(both, other.double() - exact, 0.0), dims, single)
        bound = torch.where(known_well, bound, _noise_bound(spread, off) + SLACK * floor * unit * size)
        flags = error > bound
    if not (unit >= JUDGED_UNIT if digits is None else digits):
        flags = torch.zeros_like(flags)
    total = max(float(torch.linalg.vector_norm(size)), 1e-300)
    result = replace(_lost(value, wide, exact), flagged=int(flags.sum()), groups=size.numel())
    if not bool(known.all()):
        result = replace(result, exact_nan=int(exact.isnan().sum()), exact_inf=int(exact.isinf().sum()))
    if not result.flagged:
        spans = [float(torch.linalg.vector_norm(n)) / total for n in (error, spread)]
        return replace(result, error=spans[0], spread=spans[1])
    worst = int(torch.where(flags, error / size.clamp_min(1e-300), -1.0).argmax())
    worst_size = max(float(size[worst]), 1e-300)
    shape = [1 if d in dims and not single else n for d, n in enumerate(value.shape)]
    in_flagged = flags.reshape(shape).expand(value.shape) if value.dim() else flags.reshape(())
    below = in_flagged & (exact != 0) & (exact.abs() < form.smallest_normal)
    gone = below & (wide == 0)
    wrong = float(torch.linalg.vector_norm(torch.where(in_flagged, difference, 0.0)))
    flushed = float(torch.linalg.vector_norm(torch.where(below, difference, 0.0)))
    at_worst = [float(norms[worst]) / worst_size for norms in (error, spread, bound)]
    impact = wrong / total
    if value.dtype.itemsize == 1:  # rows count alike, as in `_is_flushed`
        impact = max(impact, float(torch.where(flags, error / size.clamp_min(1e-300), 0.0).mean()))
    return replace(
        result,
        error=at_worst[0],
        spread=at_worst[1],
        limit=at_worst[2],
        impact=impact,
        flushed=flushed / max(wrong, 1e-300),
        zeroed=int(gone.sum()),
        emptied=not bool(wide.any()),
    )


def _lost(value: torch.Tensor, wide: torch.Tensor, exact: torch.Tensor) -> Examination:
    """The elements that are not finite, or that a cast to 8 bits cut off, although exact ones are neither."""
    lost_here = ~wide.isfinite() & exact.isfinite()
    saturated = 0
    if value.dtype.itemsize == 1:
        cut = cut_off(value, exact)
        lost_here, saturated = lost_here | cut, int(cut.sum())
    nan = int(wide.isnan().sum())
    masked = False
    if lost := int(lost_here.sum()):
        low = exact[lost_here]
        masked = not nan and bool((wide[lost_here] == -torch.inf).all()) and bool((low <= -(2.0**14)).all())
    return Examination(value.numel(), lost, nan, masked, saturated)


def _bounds(
    value: torch.Tensor,
    exact: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    unit: float,
    floor: float,
    dims: tuple[int, ...],
    *,
    single: bool,
    strict: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By group: its bound, the spread in it, and whether the data determine it. norms: of exact, and of its spread."""
    size, spread = norms
    elements = max(1, value.numel() // max(1, size.numel()))
    known_well = spread <= UNKNOWABLE * size
    determined = spread <= UNKNOWABLE * size * max(1.0, unit / SIXTEEN)
    damaged = (known_well & (size.numel() == 1)) | (determined & (_grouped(value.double(), dims, single) == 0))
    if strict:
        spread, known_well = torch.where(known_well, spread, 0.0), torch.ones_like(known_well)
    slack = slack_of(elements)
    if size.numel() > 1 and not (single or _are_columns(value.shape)):
        slack, spread = 2 * slack, torch.maximum(spread, _pooled(spread, size) * size)
    bound = slack * spread + SLACK * floor * unit * size
    if strict:  # the cause is known: that a sample is small by chance excuses no value of which two bits are gone
        least = SLACK * (spread + floor * unit * size)
        bound = torch.minimum(bound, torch.maximum(least, _LOST_VALUE_ERROR * size))
        if _excuses(floor * unit):
            bound = torch.where(damaged, torch.minimum(bound, _ILL * size), bound)
    if value.dtype.itemsize == 1 and _is_flushed(exact, value.dtype, dims):
        flushed_here = determined & (_grouped(_flushed(exact, value.dtype), dims, single) > _LOST_VALUE_ERROR * size)
        bound = torch.where(flushed_here, torch.minimum(bound, _LOST_VALUE_ERROR * size), bound)
        known_well = known_well | flushed_here
    return bound, spread, known_well
