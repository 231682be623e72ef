"""Where two runs part: the first op of each, on the way to a result, whose exact value the other run does not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ampcheck.core.run import Where
from ampcheck.parity.trail import Record

_SHORTEST_ROW = 8
"""The fewest elements by which a row of whole numbers is recognised: shorter ones are equal by chance."""


@dataclass(frozen=True, slots=True)
class Parting:
    """at: the first op of each run after the last value that both have, None where the run ends with that value.

    common: the op of that value in each run, None for the arguments; one alone where both end with the same value.
    reordered: both have the same numbers in another order. taken: the two go on with other elements of it.
    """

    at: tuple[Where | None, Where | None]
    common: tuple[Where | None, ...]
    reordered: bool = False
    taken: bool = False

    def described(self) -> str:
        """The last value that both have, and how each side goes on."""
        text = "they part from the arguments on"
        if len(self.common) > 1:
            first, second = (place or "the circumstance" for place in self.common)
            text = f"the last values that both have are made by {first} in a and by {second} in b"
        elif self.common[0] is not None:
            text = f"the last value that both have is made by {self.common[0]}"
        for side, where in zip("ab", self.at, strict=True):
            text += f"; then {side} runs {where}" if where is not None else f"; {side} ends with it"
        if self.reordered:
            return text + "; both have the same numbers, in another order"
        return text + ("; they take other elements of it" if self.taken or self.at == (None, None) else "")


def find_parting(runs: Sequence[Sequence[Record]], results: Sequence[int]) -> Parting:
    """Walk back from a result of two runs, over the values that the other run does not have. results: its records."""
    first, last = zip(*(walk_back(runs[i], runs[1 - i], results[i]) for i in (0, 1)), strict=True)
    ends = [run[number] for run, number in zip(runs, results, strict=True) if number >= 0]
    reordered = len(ends) == 2 and torch.allclose(ends[0].marks, ends[1].marks, 1e-9, 1e-9)
    both_have = len(ends) == 2 and first == (None, None)  # of values that both have, each takes other elements
    apart = _taken_otherwise(runs, ends if both_have else first) or (ends if both_have else None)
    taken = apart is not None and not both_have and all(record.view for record in apart)
    if apart is not None:
        if not taken:  # a view is no op, and what uses it is named
            first = tuple(None if record.view or not record.parents else record for record in apart)
        last = tuple(run[r.parents[0]] if r.parents else None for run, r in zip(runs, apart, strict=True))
    known = [record for record in last if record is not None]
    if len(known) == 2 and not known[0].differs(known[1]):
        known.pop()
    at = first[0] and first[0].where, first[1] and first[1].where
    return Parting(at, tuple(record.where for record in known) or (None,), reordered, taken)


def _taken_otherwise(runs: Sequence[Sequence[Record]], pair: Sequence[Record | None]) -> tuple[Record, Record] | None:
    """The values on the way to a pair that the same op makes of equal inputs in both runs, and that differ: it takes
    other elements, or random ones. None where no such values lead to it."""
    first, second = pair
    while first is not None and second is not None:
        if (first.where and first.where.op) != (second.where and second.where.op) or first.shape != second.shape:
            return None
        parents = [[run[n] for n in record.parents] for run, record in zip(runs, (first, second), strict=True)]
        alone = [[r for r in mine if not any(map(r.equals, other))] for mine, other in (parents, parents[::-1])]
        if not alone[0] and not alone[1]:
            return (first, second) if parents[0] and first is not pair[0] else None
        first, second = (records[0] if records else None for records in alone)
    return None


def walk_back(mine: Sequence[Record], other: Sequence[Record], start: int) -> tuple[Record | None, Record | None]:
    """The first value on the way to another that the other run does not have, and the last one that it has."""
    if start < 0:
        return None, None
    shared = shared_values(mine, other)
    if shared[start] and not _is_zero(
        mine[start]
    ):  # the other run goes on from here, or has the numbers in another order
        return None, mine[start]
    passed, common, stack = {start}, set[int](), [*mine[start].parents]
    while stack:
        number = stack.pop()
        if number not in passed and number not in common:
            (common if shared[number] else passed).add(number)
            stack.extend(() if shared[number] else mine[number].parents)
    masks = {(r.where.op, r.shape) for r in other if r.where is not None and not r.live}
    made = [i for i in passed if mine[i].where is not None]
    # A mask that one run alone has may mask nothing; one of the same shape that differs is the cause.
    telling = [i for i in made if mine[i].live or ((where := mine[i].where) and (where.op, mine[i].shape) in masks)]
    first = min(telling or made or [start])
    computed = {i for i in common if mine[i].where is not None}
    last = [i for i in computed if i in mine[first].parents] or [i for i in computed if i < first]
    return mine[first], mine[max(last)] if last else None


def shared_values(mine: Sequence[Record], other: Sequence[Record]) -> list[bool]:
    """Which values of a run are in the other: equal numbers in any layout, or rows that are all rows of the other; with
    a value, each view of it."""
    sizes: dict[int, list[Record]] = {}
    widths: dict[torch.Size, list[Record]] = {}
    for record in other:
        sizes.setdefault(record.shape.numel(), []).append(record)
        widths.setdefault(record.shape[-1:], []).append(record)
    wholes = {n: (torch.stack([r.marks for r in rs]), torch.tensor([r.noise for r in rs])) for n, rs in sizes.items()}
    pools = {width: torch.cat([r.rows for r in records]) for width, records in widths.items()}
    pools = {width: pool[pool[:, 0].argsort()] for width, pool in pools.items()}
    shared: list[bool] = []
    for record in mine:
        of_shared = record.view and record.parents[0] < len(shared) and shared[record.parents[0]]
        shared.append(of_shared or _is_whole(record, wholes) or _is_in_rows(record, pools))
    return shared


def _is_whole(record: Record, wholes: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> bool:
    numel = record.shape.numel()
    if numel not in wholes:
        return False
    return bool(record.are_near(*wholes[numel]).any())


def _is_in_rows(record: Record, pools: dict[torch.Size, torch.Tensor]) -> bool:
    width = record.shape[-1:]
    if width not in pools or (record.whole and width.numel() < _SHORTEST_ROW):
        return False
    if bool((record.rows == 0.0).all(1).any()):  # rows of zeros are found anywhere
        return _is_zero(record)
    pool = pools[width]
    place = torch.searchsorted(pool[:, 0].contiguous(), record.rows[:, 0].contiguous() - 4 * record.noise)
    near = torch.stack([pool[(place + k).clamp_max(len(pool) - 1)] for k in range(3)])
    return bool(((near - record.rows).abs() <= 8 * record.noise).all(2).any(0).all())


def _is_zero(record: Record) -> bool:
    return not bool(record.marks.any())
