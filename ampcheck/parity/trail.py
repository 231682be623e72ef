"""The trail of a run: each value that an op made, with marks of its exact companion by which another run is searched.

The marks of a value are sums and norms, which are those of the same numbers in any layout, and two numbers for each
row, by which parts of a batch or of a sequence are found in the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch

from ampcheck.core.run import Where
from ampcheck.facts.memory import has_companions, roundoff
from ampcheck.facts.norms import finite_parts, real_parts
from ampcheck.facts.store import StorageMap
from ampcheck.shadow.call import Call
from ampcheck.shadow.independent import ObservedShadow
from ampcheck.shadow.result import Reference
from ampcheck.shadow.rules.registry import rule_of

FLOAT64_NOISE = 2.0**-23
"""Difference between algorithms for one value in float64, relative to `moved - exact`. *moved* is computed in float32,
so that it is off by what roundings of float32 make of the same ops; those of float64 are 2**-29 of it, and 2**6 is for
other algorithms. It follows the conditioning by itself."""

FLOAT64_ALIKE = 2.0**-40
"""The same relative to exact: 2**13 roundings, where *moved* is at no distance (whole numbers, constants)."""

_FOLLOWED = frozenset(("aten", "prims", "_c10d_functional"))
"""Namespaces of ops that round nothing inside when they are given float64."""


class _EveryShape(frozenset[torch.Size]):
    def __contains__(self, shape: object) -> bool:
        return True


EVERY_SHAPE = _EveryShape()
"""The set of all shapes."""

_Layout: TypeAlias = tuple[object, ...]


def is_opaque(call: Call) -> bool:
    """Return whether an op cannot be followed inside: a custom kernel, which may round there whatever it is given."""
    if call.traits.random or call.traits.unset or not (call.fresh or call.written):
        return False
    name, namespace = call.traits.name, call.traits.namespace
    return not call.followed or (namespace not in _FOLLOWED and rule_of(name, namespace) is None)


@dataclass(slots=True)
class Record:
    """One value of a run, made by the op at `where` of the records `parents`.

    where: None of data that entered. marks: norm, sum, sum of magnitudes, largest and smallest element, and how many
    are NaN, inf and -inf. rows: of each row a weighted sum, the norm, and a weighted sum of what is not finite. noise:
    how far float64 itself may be off. live: made of data, and no mask or table. view: another layout of the record that
    is its parent. kept: the value and its companions, of data, masks, tables, and of the shapes that are kept. bits: a
    hash of the real values. opaque: made by an op that cannot be followed inside. whole: every element is a whole
    number.
    """

    where: Where | None
    parents: tuple[int, ...]
    marks: torch.Tensor
    rows: torch.Tensor
    shape: torch.Size
    noise: float
    live: bool = False
    view: bool = False
    kept: tuple[torch.Tensor, Reference] | None = None
    bits: int = 0
    opaque: bool = False
    whole: bool = False

    def differs(self, other: Record) -> bool:
        """Return whether the numbers of two values differ by more than float64 itself may, in whatever layout they
        are."""
        return self.shape.numel() != other.shape.numel() or not bool(self.are_near(other.marks, other.noise))

    def are_near(self, marks: torch.Tensor, noise: float | torch.Tensor) -> torch.Tensor:
        """Which of these marks, of as many elements and with these noises, are those of the same numbers."""
        of_sums = self.shape.numel() ** 0.5  # a norm of n equal errors is sqrt(n) of them, a sum at most as often again
        allowed = torch.as_tensor(noise, dtype=torch.float64).clamp_min(self.noise)[..., None]
        return (
            (marks - self.marks).abs() <= allowed * torch.tensor([1.0, of_sums, of_sums, 1.0, 1.0, 0.0, 0.0, 0.0])
        ).all(-1)

    def equals(self, other: Record) -> bool:
        """Return whether two values are equal row by row, as far as float64 is exact."""
        if self.shape != other.shape:
            return False
        return bool(((self.rows - other.rows).abs() <= 8 * max(self.noise, other.noise)).all())

    @property
    def value(self) -> torch.Tensor:
        """The real values of a record that is kept."""
        assert self.kept is not None
        return self.kept[0]


class Trail:
    """Records every value that a shadow follows.

    shapes: of the values that are kept. bits: hash the real values.
    """

    def __init__(self, *, shapes: frozenset[torch.Size] = frozenset(), bits: bool = False) -> None:
        self.records: list[Record] = []
        self.shadow: ObservedShadow
        self.shapes, self.bits = shapes, bits
        self._known = StorageMap[dict[_Layout | None, int]]()
        self._chooses = False  # an opaque op returned integers, and what they choose has no parent here

    def __call__(self, call: Call) -> None:
        """Record the results of an op."""
        written = {id(tensor) for tensor in call.written}
        inputs = [t for t in call.inputs if has_companions(t) and t.numel()]
        parents = tuple(self.number(t, as_view=id(t) not in written) for t in inputs)
        live = any(self.records[parent].live for parent in parents) and not call.traits.unset
        opaque = is_opaque(call)
        for tensor in (*call.fresh, *call.written):
            if has_companions(tensor) and tensor.numel():
                number = self._add(tensor, self._record(tensor, call.where, parents, live=live))
                self.records[number].opaque = opaque
            elif opaque:
                self._chooses = True

    def number(self, tensor: torch.Tensor, *, as_view: bool = True) -> int:
        """The record of a tensor: of its memory, or, `as_view`, of its own layout of it. Data that enters is
        recorded."""
        known, layout = self._known.get(tensor), _layout(tensor)
        if known is None:
            return self._add(tensor, self._record(tensor, None, (), live=tensor.dim() > 0))
        if layout in known or not as_view:
            return known.get(layout, known[None])
        whole = self.records[known[None]]
        record = self._record(tensor, whole.where, (known[None],), live=whole.live)
        record.view = True
        number = self._append(tensor, record)
        known[layout] = number
        return number

    def _add(self, tensor: torch.Tensor, record: Record) -> int:
        """Add the record of memory that was written: earlier views of it are out of date."""
        number = self._append(tensor, record)
        self._known.put(tensor, {None: number, _layout(tensor): number})
        return number

    def _append(self, tensor: torch.Tensor, record: Record) -> int:
        if record.where is None or not record.live or tensor.shape in self.shapes:
            record.kept = tensor.detach().clone(), self.shadow.reference(tensor)
        if self.bits:
            record.bits = hash(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        self.records.append(record)
        return len(self.records) - 1

    def _record(self, tensor: torch.Tensor, where: Where | None, parents: tuple[int, ...], *, live: bool) -> Record:
        given = real_parts(self.shadow.exact(tensor))
        exact, moved = finite_parts(given), finite_parts(self.shadow.moved(tensor))
        whole = bool((exact == exact.round()).all())
        exact, moved = (t.sign() * t.abs().log1p() for t in (exact, moved))  # beside -3e38 of a mask all would be equal
        flat = exact.reshape(-1)
        size = torch.linalg.vector_norm(flat)
        places = [test(given) for test in (torch.isnan, torch.isposinf, torch.isneginf)]
        counts = [place.sum() for place in places]
        marks = torch.stack([size, flat.sum(), flat.abs().sum(), flat.amax(), flat.amin(), *counts])
        length = exact.shape[-1] if exact.dim() else 1
        lines, weights = exact.reshape(-1, length), row_weights(length)
        nonfinite = torch.stack(places, -1).double() @ torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
        sums = [lines @ weights, torch.linalg.vector_norm(lines, dim=1), nonfinite.reshape(-1, length) @ weights]
        rows = torch.stack(sums, 1)
        away = float(torch.linalg.vector_norm(moved.reshape(-1) - flat))
        noise = FLOAT64_NOISE * away + FLOAT64_ALIKE * float(size)
        return Record(where, parents, marks, rows, tensor.shape, noise, live, whole=whole)

    def is_behind_opaque(self, number: int) -> bool:
        """True if an op that cannot be followed inside made this record, or one that leads to it."""
        return self._chooses or any(self.records[i].opaque for i in self.behind([number]))

    def coarsest_not_in(self, other: Trail, results: Iterable[int]) -> float:
        """The unit roundoff of data behind these records that the other run does not have."""
        return max((roundoff(record.value.dtype) for record in self.own_data(other, results)), default=0.0)

    def own_data(self, other: Trail, results: Iterable[int]) -> list[Record]:
        """Data behind these records that the other run does not have: tables and weights made outside of the run. Data
        that leads to none of them explains no difference."""
        twins = {record.marks.numpy().tobytes() for record in other.records if record.where is None}
        behind = (self.records[number] for number in sorted(self.behind(results)))
        own = [r for r in behind if r.where is None and r.kept and r.marks.numpy().tobytes() not in twins]
        if not own:
            return []
        zero = torch.zeros(1, dtype=torch.float64)
        known = [_exact(record) for record in other.records if record.kept and record.where is None]
        exact = [_exact(record) for record in own]
        together = torch.isin(torch.cat(exact), torch.cat([zero, *known]))
        shared = torch.split(together, list(map(len, exact)))
        return [record for record, every in zip(own, shared, strict=True) if not bool(every.all())]

    def behind(self, results: Iterable[int]) -> set[int]:
        """The records that lead to these."""
        behind, stack = set[int](), list(results)
        while stack:
            number = stack.pop()
            if number not in behind:
                behind.add(number)
                stack.extend(self.records[number].parents)
        return behind


def _exact(record: Record) -> torch.Tensor:
    assert record.kept is not None
    return finite_parts(record.kept[1].exact).reshape(-1)


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())


@lru_cache(maxsize=64)
def row_weights(length: int) -> torch.Tensor:
    """Weights of the elements of a row, none of which is like another."""
    return torch.cos(torch.arange(length, dtype=torch.float64) * 1.7548776662466927)
