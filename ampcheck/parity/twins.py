"""Data of one side that are values of the other, rounded: weights in 16 bits beside the same in float32, a table that
was made outside beside one that is computed inside.

Such data make the exact values of the two differ by roundings, behind which a small fault could hide. In one more run
the values of the other side stand for them, and exact values have to be equal again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from ampcheck.facts.memory import roundoff
from ampcheck.facts.sides import Change
from ampcheck.parity.calls import Side
from ampcheck.parity.execution import Execution, execute
from ampcheck.parity.functions import rounding_explains
from ampcheck.parity.trail import Record, Trail
from ampcheck.records.results import JUDGED_UNIT, SLACK, Key

_APART = 8.0
"""Roundings of float32 by which two ways to compute an element of a table differ."""

_MANY = 256
"""Elements from which the mean of their roundings says something."""

_MOST = 0.5
"""The share of elements that are roundings from which data are those of the other side, with others among them."""


def run_with_twins(
    sides: Sequence[Side], runs: Sequence[Execution], keys: Sequence[Key]
) -> tuple[list[Execution], list[Change], float]:
    """Both sides once more, where exact decides, with values of the other side for data that are such, rounded; none
    where there are no such data. Also what changed these, and the unit roundoff of other data that one side alone has.
    runs: with a trail.
    """
    trails = [run.trail for run in runs if run.trail is not None]
    if len(trails) < 2:
        return [], [], 0.0
    left = [
        mine.own_data(other, [run.records[key] for key in keys if key in run.records])
        for run, mine, other in zip(runs, trails, trails[::-1], strict=True)
    ]
    twins: list[dict[bytes, torch.Tensor]] = [{}, {}]
    for number in (0, 1):
        for record in left[number]:
            used, exact = _stand_in(record, trails[1 - number])
            if used:
                twins[number][_key(_memory(record, record.value))] = _memory(record, exact)
                left[number] = [own for own in left[number] if own is not record]
                left[1 - number] = [own for own in left[1 - number] if id(own) not in used]  # these stay
    if not any(twins):
        return [], [], 0.0
    changes: list[Change] = [partial(_replaced, known) for known in twins]
    again = [
        execute(side, trail=Trail(), independent=True, change=change)
        for side, change in zip(sides, changes, strict=True)
    ]
    return again, changes, max((roundoff(record.value.dtype) for records in left for record in records), default=0.0)


def _stand_in(record: Record, other: Trail) -> tuple[set[int], torch.Tensor]:
    """Return what stands for data: values of the other run of which they are roundings, or parts of such, as of
    projections that one side fuses; and the records of these, none where there are no such."""
    value = record.value
    for dim in range(0 if value.is_complex() else value.dim()):
        exact, place, used = value.double(), 0, set[int]()
        while place < value.shape[dim] and (
            found := _first_part(value.narrow(dim, place, value.shape[dim] - place), dim, other)
        ):
            exact.narrow(dim, place, found[1].shape[dim]).copy_(found[1])
            used.add(id(found[0]))
            place += found[1].shape[dim]
        if place == value.shape[dim]:
            return used, exact
    return set(), value


def _first_part(value: torch.Tensor, dim: int, other: Trail) -> tuple[Record, torch.Tensor] | None:
    """A value of the other run, or a part of it along a dimension, of which the first elements are roundings."""
    for twin in other.records:
        if twin.kept is None or twin.value.is_complex() or len(twin.shape) != value.dim():
            continue
        size = min(twin.shape[dim], value.shape[dim])
        first = value.narrow(dim, 0, size)
        for start in range(0, twin.shape[dim] - size + 1, size):
            real, exact = (t.narrow(dim, start, size) for t in (twin.value, twin.kept[1].exact))
            part = _unrounded(first, real, exact) if real.shape == first.shape else None
            if part is not None:
                return twin, part
    return None


def _unrounded(value: torch.Tensor, real: torch.Tensor, exact: torch.Tensor) -> torch.Tensor | None:
    """The exact values of which data are roundings; None if too few elements are. Others keep their value."""
    unit, of_twin = roundoff(value.dtype), roundoff(real.dtype)
    rounded = (exact.to(value.dtype) == value) | (real.to(value.dtype) == value)
    if unit <= JUDGED_UNIT:
        allowed = _APART * unit
    elif value.dtype == real.dtype and torch.equal(real.double(), exact):
        allowed = 0.0  # data in one format are equal, or no roundings of each other
    else:  # rounded from what is rounded itself, or was computed in another way
        allowed = unit + (of_twin if of_twin > JUDGED_UNIT else _APART * roundoff(torch.float32))
    near = rounded | ((value.double() - exact).abs() <= allowed * exact.abs())
    most = unit > JUDGED_UNIT and float(rounded[exact != 0].double().mean()) > _MOST
    if (most or bool(near.all())) and not _leans(value.double(), exact, max(unit, of_twin)):
        return torch.where(near, exact, value.double())
    return None


def _leans(value: torch.Tensor, exact: torch.Tensor, unit: float) -> bool:
    """Return whether data are off in one direction, as a factor makes them: roundings of many elements average out."""
    square = float(exact.square().sum())
    if exact.numel() < _MANY or not 0.0 < square < torch.inf:
        return False
    along = float(((value - exact) * exact).sum()) / square
    return abs(along) > SLACK * unit / math.sqrt(exact.numel())


def beyond_roundings(
    sides: Sequence[Side], runs: Sequence[Execution], keys: Sequence[Key], changes: Sequence[Change]
) -> list[Key]:
    """The results that differ by more than rounding the data in 16 bits explains that one side alone holds.

    Both run once more with such data moved by one of their roundings, up or down at random. changes: of the data of
    both, before they are moved.
    """
    moved: list[Execution] = []
    trails = [run.trail for run in runs if run.trail is not None]
    for number, (side, run) in enumerate(zip(sides, runs, strict=True)):
        results = [run.records[key] for key in keys if key in run.records]
        own = trails[number].own_data(trails[1 - number], results)
        known = {_key(_memory(r, r.value)): roundoff(r.value.dtype) for r in own if r.value.dtype.itemsize <= 2}
        change = partial(_moved_by_a_rounding, known, changes[number : number + 1])
        moved.append(execute(side, trail=Trail(), independent=True, change=change) if known else run)
    both = {key: ([run.results[key] for run in runs], [run.results[key] for run in moved]) for key in keys}
    return [key for key, (a, b) in both.items() if not rounding_explains(*a, *b)]


def _replaced(twins: Mapping[bytes, torch.Tensor], exact: torch.Tensor) -> torch.Tensor:
    twin = twins.get(_key(exact))
    return exact if twin is None else twin.clone()


def _moved_by_a_rounding(units: Mapping[bytes, float], before: Sequence[Change], exact: torch.Tensor) -> torch.Tensor:
    unit = units.get(_key(exact))
    for change in before:
        exact = change(exact)
    if unit is None:
        return exact
    signs = torch.randint(2, exact.shape, generator=torch.Generator().manual_seed(exact.numel())) * 2 - 1
    return exact * (1 + unit * signs.double())


def _memory(record: Record, values: torch.Tensor) -> torch.Tensor:
    """Values of data, flat, as memory has them."""
    copied = torch.empty_like(record.value, dtype=torch.float64).copy_(values)
    return copied.as_strided((copied.numel(),), (1,))


def _key(exact: torch.Tensor) -> bytes:
    return exact.numpy().tobytes()
