"""Compares two results as values of one function: their exact values are equal to what float64 can hold."""

from __future__ import annotations

import math

import torch

from ampcheck.facts.memory import roundoff
from ampcheck.facts.norms import finite_parts, group_norms, norm, ratio, real_parts
from ampcheck.parity.trail import FLOAT64_ALIKE, FLOAT64_NOISE
from ampcheck.records.results import JUDGED_UNIT, MOVE, SLACK, UNKNOWABLE
from ampcheck.shadow.bounds import group_dims, slack_of
from ampcheck.shadow.compare import Result
from ampcheck.shadow.result import Reference

_INVISIBLE_DISTANCE = 2.0**-27
"""The relative distance of exact values that no result shows: an eighth of a rounding of float32. Constants of eight
digits and branches such as that of `softplus` beyond 20 differ by less."""

_TABLES = 64.0
"""Multiple of the effect of one rounding of float32 that may be due to tables in float32, whose entries are
off by more than one rounding: the sine of an angle of 64 is off by 64 * 2**-24."""

SAME, ALIKE, ROUNDED, UNDETERMINED = "same", "alike", "rounded", "undetermined"
"""Equal; apart by less than float32 shows; apart by roundings of data that one side alone holds; apart, where the data
determine nothing."""

NONFINITE = "infinities or NaN are in other places"
"""Difference of two functions that no tie explains."""


def relate(a: Result, b: Result, coarsest: float = 0.0) -> str:
    """`SAME`, `ROUNDED` or `UNDETERMINED`, or by how much two functions part.

    coarsest: the unit roundoff of data that only one of them holds, such as tables in float32.
    """
    if a.value.shape != b.value.shape:
        return f"shapes {list(a.value.shape)} and {list(b.value.shape)}"
    if (a.reference is None) != (b.reference is None):
        return f"dtypes {a.value.dtype} and {b.value.dtype}, of which one is no floating format"
    if a.reference is None or b.reference is None:
        other = int((a.value != b.value).sum())
        return SAME if not other else f"{other:,} of {a.value.numel():,} integers differ"
    if not a.value.numel():
        return SAME
    return _relate_floats(a.reference, b.reference, coarsest)


def _relate_floats(a: Reference, b: Reference, coarsest: float) -> str:
    exact, other, moved, moved_other = (real_parts(t).double() for t in (a.exact, b.exact, a.moved, b.moved))
    both = exact.isfinite() & other.isfinite()
    if not torch.equal(_marked(exact, ~both), _marked(other, ~both)):
        return NONFINITE
    off, size, away = _distances(exact, other, moved, moved_other)
    apart = off > FLOAT64_NOISE * away + FLOAT64_ALIKE * size
    if not bool(apart.any()):
        return SAME
    if bool((off <= _INVISIBLE_DISTANCE * size).all()):
        return ALIKE
    if bool((off <= (SLACK if coarsest > JUDGED_UNIT else _TABLES) * away * coarsest / MOVE).all()):
        return ROUNDED
    if bool(((off <= away) & (away > UNKNOWABLE * size))[apart].all()):
        return UNDETERMINED
    worst = float((off / size.clamp_min(1e-300))[apart].max())
    rows = f" in {int(apart.sum()):,} of {apart.numel():,} rows" if apart.numel() > 1 else ""
    return f"exact values differ by {worst:.2g} of their size{rows}"


def _distances(
    exact: torch.Tensor, other: torch.Tensor, moved: torch.Tensor, moved_other: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By group, of what is finite: how far two exact values lie apart, their size, and how far moving takes one."""
    both, dims = exact.isfinite() & other.isfinite(), group_dims(exact.shape)
    values = exact - other, torch.maximum(exact.abs(), other.abs()), moved - exact, moved_other - other
    off, size, *aways = (group_norms(torch.where(both & t.isfinite(), t, 0.0), dims) for t in values)
    away = torch.maximum(*aways)
    return off, size, torch.maximum(away, min(ratio(away, size), 1.0) * size)  # one sample is small in some rows


def rounding_explains(a: Result, b: Result, moved_a: Result, moved_b: Result) -> bool:
    """Return whether exact values are no further apart than moving the data by a rounding moves one of them.

    Honest roundings move them by somewhat less than one sample of such a move, which few elements show badly.
    """
    if any(result.reference is None for result in (a, b, moved_a, moved_b)):
        return True
    exact, other, *moved = (
        finite_parts(r.reference.exact) for r in (a, b, moved_a, moved_b) if r.reference is not None
    )
    if any(tensor.shape != exact.shape for tensor in moved):
        return True
    off, size, away = _distances(exact, other, *moved)
    return bool((off <= slack_of(exact.numel() // off.numel()) / 2 * away + FLOAT64_ALIKE * size).all())


def element_apart(a: Result, b: Result, unit: float) -> int | None:
    """Where exact values of one shape are furthest apart, if by more than one rounding, of this unit, of the largest.

    What data in float64 are rounded by themselves counts as well.
    """
    expected, value = exact_values(a), exact_values(b)
    if not expected.numel():
        return None
    finite = expected.isfinite()
    apart = torch.where(finite & value.isfinite(), value - expected, 0.0).abs()
    spread = real_parts(b.reference.moved).reshape(-1) - value if b.reference is not None else torch.zeros_like(value)
    limit = unit * float(torch.where(finite, expected, 0.0).abs().amax())
    limit += SLACK * float(spread.abs().nan_to_num(0.0, 0.0).amax()) * roundoff(torch.float64) / MOVE
    wrong = (apart > limit) | (finite != value.isfinite())
    return int(torch.where(wrong, apart, -1.0).argmax()) if bool(wrong.any()) else None


def exact_values(result: Result) -> torch.Tensor:
    """The exact values of a result in a row, in float64."""
    return real_parts(result.value if result.reference is None else result.reference.exact).double().reshape(-1)


def roundings_between(a: Result, b: Result) -> float:
    """The distance of two results in unit roundoffs of the coarser format in their histories."""
    if a.reference is None or b.reference is None or not (size := norm(a.reference.exact)):
        return 0.0
    first, second = finite_parts(a.value), finite_parts(b.value)
    unit = max(a.reference.unit, b.reference.unit)
    return float(torch.linalg.vector_norm(first - second)) / (unit or 1.0) / size


def is_determined(result: Result) -> bool:
    """Return whether the data determine anything of a result, and it is not zero."""
    reference = result.reference
    if reference is None:
        return True
    size, spread = norm(reference.exact), norm(real_parts(reference.moved).double() - real_parts(reference.exact))
    return size > 0 and spread * reference.unit / MOVE <= UNKNOWABLE * size


def is_mask(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds ones, and zeros beside them alone."""
    return torch.equal(tensor * tensor, tensor) and bool(tensor.any())


def _marked(tensor: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The elements at some places, NaN as a number that is equal to itself."""
    return tensor[where].nan_to_num(math.pi)


def have_equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are of one shape and dtype and contain the same bits, NaN for NaN."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    first, second = (t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(first, second)
