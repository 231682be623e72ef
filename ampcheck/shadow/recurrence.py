"""Tests whether an error that exceeds its limit recurs, or was an accident of one execution out of many.

The limit of a result rests on one sample of how far its conditioning spreads errors. Where terms cancel, that sample is
now and then far too small: of thousands of executions of one sound op a few exceed their limits. A defect recurs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ampcheck.core.run import Where
from ampcheck.facts.history import Key
from ampcheck.records.faults import CANCELLATION, DRIFT, OVERFLOW, ROUNDING, Fault

_FIRST = 64
"""Executions of an op at one place from which on errors must recur; among the first ones each counts."""

_WINDOW = 256
"""Executions in a row among which errors are counted."""

_RECURS = 4.0
"""Errors in a window that no accident explains: a sound op has them in fewer than one of 1,000 executions."""

_EXCESS_FACTOR = 32.0
"""The factor beyond its limit from which one error counts."""

_BY_CHANCE = frozenset((ROUNDING, CANCELLATION, DRIFT))
"""Kinds of faults that are measured against a sampled spread. What overflows, vanishes, collides or decides otherwise
is no chance."""


class Recurrence:
    """Counts executions by place, and errors among them. runs: of ops by their place, and the shape of the result: the
    parameters of an optimizer share one place."""

    def __init__(self) -> None:
        self.runs: Counter[tuple[Where, tuple[int, ...]]] = Counter()
        self._rates: dict[Key, tuple[float, int]] = {}  # errors, earlier ones with less weight, and the latest of them
        self._recurrent: set[Key] = set()
        self._overflows: dict[Key, tuple[int, int]] = {}

    def note(self, fault: Fault, *, accumulates: bool) -> None:
        """An error at a place that was counted. accumulates: of a tensor that adds up, whose error stays."""
        runs = self.runs.get((fault.where, fault.shape), 0)
        seen = fault.examination
        if fault.kind == OVERFLOW:
            self._overflows[fault.key] = self._overflows.get(fault.key, (0, 0))[0] + 1, self._executions(fault.key)
        far = seen.lost or seen.error > _EXCESS_FACTOR * seen.limit
        if fault.kind not in _BY_CHANCE or accumulates or runs <= _FIRST or far:
            self._recurrent.add(fault.key)
            return
        self._count(fault.key, runs)

    def note_return(self, where: Where, shape: tuple[int, ...], inherited: Iterable[Key]) -> None:
        """An op at this place met errors: its own earlier ones are in a value that lives on, and are no accident."""
        for key in inherited:
            if key[1] == where and key in self._rates:
                self._count(key, self.runs.get((where, shape), 0))

    def _count(self, key: Key, runs: int) -> None:
        weight, last = self._rates.get(key, (0.0, 0))
        weight = weight * (1.0 - 1.0 / _WINDOW) ** (runs - last) + 1.0
        self._rates[key] = weight, runs
        if weight >= _RECURS:
            self._recurrent.add(key)

    def recurs(self, key: Key) -> bool:
        """Return whether the errors of a fault are more than an accident."""
        return key in self._recurrent or key not in self._rates

    def recovers(self, key: Key) -> bool:
        """Return whether an op that overflowed gave finite results, of any shape, at its last execution or at most of
        them."""
        times, latest = self._overflows.get(key, (0, 0))
        runs = self._executions(key)
        return runs > latest or runs > 2 * times

    def _executions(self, key: Key) -> int:
        return sum(runs for (where, _), runs in self.runs.items() if where == key[1])
