"""Findings of a shadow: faults, the suspects that travel with its values, and the results that both reach."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from ampcheck.facts.history import Key
from ampcheck.facts.memory import largest_number
from ampcheck.facts.values import Companions, CompanionStore
from ampcheck.records.faults import Fault
from ampcheck.records.results import FLOOR
from ampcheck.shadow.call import Call
from ampcheck.shadow.cause import part_of_sum
from ampcheck.shadow.comparisons import ZERO
from ampcheck.shadow.norms import relative_error
from ampcheck.shadow.reached import Reached
from ampcheck.shadow.recurrence import Recurrence
from ampcheck.shadow.suspects import COLLIDED, VANISHED, Suspects

_LOST_VALUE_ERROR = 0.25
"""The relative error of an output from which less than two bits agree: whatever explains it, the value is lost."""

_LACKS = "a sum that lacks it"


class Found:
    """The faults of a run by their keys. scale: of a `GradScaler`."""

    def __init__(self, store: CompanionStore) -> None:
        self.suspects, self.reached, self.recurrence = Suspects(), Reached(), Recurrence()
        self.scale = 1.0
        self._store = store
        self._faults: dict[Key, Fault] = {}

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults in the order in which they first happened, with what they reached."""
        counts = [key for key in self._faults if self.recurrence.recurs(key) and not self._heals(key)]
        recorded = (replace(self._faults[key], reaches=self.reached.of(key)) for key in counts)
        return tuple(sorted(recorded, key=lambda fault: fault.index))

    def known(self, keys: Collection[Key]) -> list[Fault]:
        """The faults with these keys; others are of other ranks."""
        return [self._faults[key] for key in keys if key in self._faults]

    def add(self, fault: Fault, reaches: str = "") -> None:
        """Record a fault, once more where it is known, and what it reaches."""
        self._faults[fault.key] = self._faults[fault.key] + fault if fault.key in self._faults else fault
        if reaches:
            self.reached.note(fault.key, reaches)

    def accuse(self, suspect: Fault, reaches: str) -> None:
        """Record a suspect as the fault that it is."""
        self._faults.setdefault(suspect.key, suspect)
        self.reached.note(suspect.key, reaches)

    def accuse_if_lost(self, suspect: Fault, tensor: torch.Tensor, name: str) -> None:
        """Report a suspect of a tensor whose digits are gone. A zero of float64, as the rest of a sum, has none."""
        if _LOST_VALUE_ERROR < (error := relative_error(tensor, self._store)) < 1 / ZERO:
            self.add(replace(suspect, examination=replace(suspect.examination, error=error)), name)

    def accuse_missing(self, call: Call) -> None:
        """Report the terms of a sum that are zero throughout and not in float64, beyond what roundings of the sum hide.

        The sum may be near its exact value all the same, as a noisy sample without its noise. A single number, such as
        a hinge loss, may be zero by chance, and a sum that cancels in float64 has no size.
        """
        results = call.written + call.fresh
        if not results or not call.traits.adds or call.traits.divides or call.traits.foreach:
            return
        for term, companions in zip(call.inputs, call.before, strict=True):
            suspected = companions.faults or VANISHED in companions.suspects
            if not suspected or results[0].numel() == 1 or bool(term.any()):
                continue
            if FLOOR * companions.unit < part_of_sum(call, term, results[0], self._store) < 1 / ZERO:
                if companions.faults:
                    self.reach_values([companions], _LACKS)
                else:
                    for suspect in self.suspects.of([companions], VANISHED):
                        self.accuse(suspect, _LACKS)

    def forget(self, keys: Collection[Key]) -> None:
        """Take back faults that turn out to be none."""
        for key in keys:
            self._faults.pop(key, None)

    def reach_values(self, values: Sequence[Companions], name: str, *, reported: bool = False) -> None:
        """Record what is left in values that leave the run: faults, and whole numbers that collided."""
        for key in frozenset[Key]().union(*[c.faults for c in values]):
            self.reached.note(key, name, reported=reported)
        for suspect in self.suspects.of(values, COLLIDED):
            self.accuse(suspect, name)

    def discard(self, companions: Companions) -> None:
        """Record which faults are in a value that is gone and that no op has used."""
        if not companions.consumed:
            top = largest_number(torch.float32)
            large = [fault.key for fault in self.known(companions.faults) if fault.exact_amax > top]
            self.reached.discard(companions.faults, scaled=self.scale != 1, large=large)

    def _heals(self, key: Key) -> bool:
        """Return whether all that a fault did was to spoil gradients that the code discarded, and the op is finite
        later."""
        return self.reached.unused(key) and self.recurrence.recovers(key)
