"""Results that faults reach: outputs, weights, gradients and decisions.

A `GradScaler` skips a step whose gradients are not finite, and lowers the scale: an overflow does no harm by that, once
a step with the same gradients is made. Where steps were made before, the run may also end while the scale comes down.
Code that has a loss scale of its own tests gradients and discards them. So does code that computes a result again in a
wider format where it is not finite.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import TypeAlias

import torch

from ampcheck.core.formats import format_of
from ampcheck.core.run import Where
from ampcheck.facts.history import Key
from ampcheck.records.faults import OVERFLOW, Fault
from ampcheck.shadow.call import Call

Gradients: TypeAlias = "tuple[tuple[int, ...], ...]"
"""The shapes of the gradients that a scaler unscales together."""

UNSCALES = "_amp_foreach_non_finite_check_and_unscale_"
"""The op by which a `GradScaler` unscales gradients."""

LEFT = "a number that left the run at {}"
"""Name of a number that a fault reaches in Python, NumPy or a file: the place where it leaves."""

_COMES_DOWN = 2
"""Skipped steps in a row, at the end of a run, that lower a scale which steps were made at shortly before."""


class Reached:
    """By fault, what it reached and its share of that."""

    def __init__(self) -> None:
        self._by_key: defaultdict[Key, dict[str, float]] = defaultdict(dict)
        self._unused: defaultdict[Key, dict[str, float]] = defaultdict(dict)
        self._tested: set[Key] = set()
        self.lost: defaultdict[tuple[str, torch.Size], dict[tuple[float, float], Key]] = defaultdict(dict)
        self._missing = Counter[Key]()
        self._skipped: dict[Gradients, dict[Key, dict[str, float]]] = {}
        self._made: set[Gradients] = set()
        self._in_a_row = Counter[Gradients]()

    def of(self, key: Key) -> Mapping[str, float]:
        """Return what a fault reached, steps among it that were skipped and never made."""
        skipped = [keys[key] for steps, keys in self._skipped.items() if key in keys and not self._passes(steps, key)]
        repeated = key in self._tested and self._missing.get(key) == 0
        unused = {} if repeated else self._unused.get(key, {})
        return {name: s for reached in (*skipped, self._by_key.get(key, {}), unused) for name, s in reached.items()}

    def note(self, key: Key, name: str, share: float = 1.0, *, reported: bool = False, discarded: bool = False) -> None:
        """Record that a fault reached something; of several shares, the largest.

        reported: a number that leaves the run, such as the norm of all gradients. discarded: what nothing has read.
        """
        unused = key[0] == OVERFLOW and (discarded or (reported and _is_backward(key)))
        places = [keys[key] for keys in self._skipped.values() if key in keys]
        for place in places or [self._unused[key] if unused else self._by_key[key]]:
            place[name] = max(share, place.get(name, 0.0))

    def discard(self, keys: Collection[Key], *, scaled: bool, large: Collection[Key] = ()) -> None:
        """Record faults of a tensor from which no later op computed. scaled: a loss scale is in use. large: faults of
        values that not even float32 holds.

        Gradients that another loss adds to, and that `zero_grad` discards before a step reads them, do no harm. Nor do
        large values, of a broken sample, where the run tests whether they are finite.
        """
        for key in keys:
            if not ((key in large and key in self._tested) or (scaled and _is_backward(key))):
                self.note(key, "a tensor that no later arithmetic read", discarded=True)

    def unscale(self, call: Call) -> float:
        """Record whether a step of a `GradScaler` is made, or skipped and tried at a lower scale. Returns its scale.

        Whatever the faults of a skipped step reach counts if no such step is made later.
        """
        gradients = tuple(tuple(gradient.shape) for gradient in call.written[:-1])
        if bool(call.written[-1]):
            self._in_a_row[gradients] += 1
            skipped = self._skipped.setdefault(gradients, {})
            for key in call.inherited:
                skipped.setdefault(key, {})["steps that a scaler skips"] = 1.0
        else:
            self._skipped.pop(gradients, None)
            self._made.add(gradients)
            self._in_a_row[gradients] = 0
        inverse = float(call.args[2])
        return 1 / inverse if inverse else float("inf")

    def test(self, keys: Collection[Key]) -> None:
        """Record that the run tests whether values are finite that these faults are in."""
        self._tested.update(keys)

    def unused(self, key: Key) -> bool:
        """Return whether all that a fault of backward made infinite or NaN was reported or discarded."""
        return _is_backward(key) and key in self._unused and self.of(key).keys() == self._unused[key].keys()

    def lose(self, fault: Fault, exact: torch.Tensor) -> None:
        """Note a result of forward that is not finite, which the run may compute again."""
        if fault.kind != OVERFLOW or _is_backward(fault.key):
            return
        seen = fault.examination
        if seen.saturated and seen.error > 2 * format_of(fault.dtype).unit_roundoff:
            self.note(fault.key, "the value that was cast", seen.error)  # the bounds of 8 bits excuse it further on
        lost, sums = self.lost[fault.where.op, exact.shape], _sums(exact)
        self._missing[fault.key] += sums not in lost
        lost.setdefault(sums, fault.key)

    def repeat(self, where: Where, exact: torch.Tensor) -> None:
        """Note a result that is within its bound: what an op lost elsewhere if it is the same in float64."""
        lost = self.lost.get((where.op, exact.shape))
        key = lost.get(_sums(exact)) if lost else None
        if lost and key is not None and key[1] != where:
            del lost[_sums(exact)]
            self._missing[key] -= 1

    def _passes(self, gradients: Gradients, key: Key) -> bool:
        """Return whether a lower scale mends a fault of skipped steps: one of backward, where steps were made
        before."""
        return _is_backward(key) and gradients in self._made and self._in_a_row[gradients] <= _COMES_DOWN


def _is_backward(key: Key) -> bool:
    return key[1].phase == "backward"


def _sums(exact: torch.Tensor) -> tuple[float, float]:
    """The sum of values and the norm of them, by which the same result is known again."""
    return float(exact.real.sum()), float(torch.linalg.vector_norm(exact))
