"""Data of one side that are values of the other, rounded: weights in 16 bits beside the same in float32, a table that
was made outside beside one that is computed inside.

Such data make the exact values of the two differ by roundings, behind which a small fault could hide. In one more run
the values of the other side stand for them, and exact values have to be equal again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from ampcheck.facts.memory import roundoff
from ampcheck.parity.calls import Side
from ampcheck.parity.execution import Execution, execute
from ampcheck.parity.trail import Record, Trail
from ampcheck.records.results import JUDGED_UNIT, Key

_APART = 8.0
"""Roundings of float32 by which two ways to compute an element of a table differ."""

_NEXT = 2.0
"""Roundings to 16 bits by which roundings of one number differ, where it was rounded twice."""

_MOST = 0.5
"""The share of elements that are roundings from which data are those of the other side, with others among them."""


def run_with_twins(
    sides: Sequence[Side], runs: Sequence[Execution], keys: Sequence[Key]
) -> tuple[list[Execution], float]:
    """Both sides once more, where exact decides, with values of the other side for data that are such, rounded; none
    where there are no such data. Also the unit roundoff of other data that one side alone has. runs: with a trail.
    """
    trails = [run.trail for run in runs if run.trail is not None]
    if len(trails) < 2:
        return [], 0.0
    left = [
        mine.own_data(other, [run.records[key] for key in keys if key in run.records])
        for run, mine, other in zip(runs, trails, trails[::-1], strict=True)
    ]
    twins: list[dict[bytes, torch.Tensor]] = [{}, {}]
    for number in (0, 1):
        for record in list(left[number]):
            found = _stand_in(record, trails[1 - number])
            if found is not None:
                twin, exact = found
                twins[number][_key(_memory(record, record.value))] = _memory(record, exact)
                left[number].remove(record)
                left[1 - number] = [other for other in left[1 - number] if other is not twin]  # it stays
    if not any(twins):
        return [], 0.0
    changes = [partial(_replaced, known) for known in twins]
    again = [
        execute(side, trail=Trail(), independent=True, change=change)
        for side, change in zip(sides, changes, strict=True)
    ]
    return again, max((roundoff(record.value.dtype) for records in left for record in records), default=0.0)


def _stand_in(record: Record, other: Trail) -> tuple[Record, torch.Tensor] | None:
    """The value of the other run of which data are roundings, and what stands for them: an element that no rounding
    makes of it stays as it is."""
    value, unit = record.value, roundoff(record.value.dtype)
    for twin in other.records:
        if twin.kept is None or twin.shape != record.shape or value.is_complex() or twin.value.is_complex():
            continue
        exact = twin.kept[1].exact
        rounded = (exact.to(value.dtype) == value) | (twin.value.to(value.dtype) == value)
        roundings = _APART if unit <= JUDGED_UNIT else _NEXT
        near = rounded | ((value.double() - exact).abs() <= roundings * unit * exact.abs())
        if bool(near.all()) or (unit > JUDGED_UNIT and float(rounded[exact != 0].double().mean()) > _MOST):
            return twin, torch.where(near, exact, value.double())
    return None


def _replaced(twins: Mapping[bytes, torch.Tensor], exact: torch.Tensor) -> torch.Tensor:
    twin = twins.get(_key(exact))
    return exact if twin is None else twin.clone()


def _memory(record: Record, values: torch.Tensor) -> torch.Tensor:
    """Values of data, flat, as memory has them."""
    copied = torch.empty_like(record.value, dtype=torch.float64).copy_(values)
    return copied.as_strided((copied.numel(),), (1,))


def _key(exact: torch.Tensor) -> bytes:
    return exact.numpy().tobytes()
