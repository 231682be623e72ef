"""Suspects: events that do no harm by themselves, and are the cause where harm is done later.

A suspect travels with the values, from the place where it happened, until it is gone or an op suffers from it:

- vanished: elements that are zero here and not in exact. Something may divide by them, or lack them in a sum.
- masked: negative infinities of an additive mask. A row of nothing else makes NaN.
- collided: different whole numbers that became equal. Something may take them for positions, ids or rows.
- blurred: an op rounded away the differences between elements. Something may rank them.
- ill: a result of which the data determine next to nothing in the format of the run, by an op whose inputs they do
  determine. It is lost where it reaches an output.
- error: what the run differs by from its own reference, see `ampcheck.shadow.comparisons`. What is made of it is not
  judged.
- bound: most values are a floor that a clamp gave them. Something may divide by them.
- cut: the end of a format of 8 bits took most digits of the values. Something may cast them to that format.
- unheld: what was added to 16-bit values that did not hold it. They may be those of a weight.
- taken: what a sum has taken up of a term, see `ampcheck.shadow.increments`. It is lost where it reaches an output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

import torch

from ampcheck.core.run import Where
from ampcheck.facts.history import Key
from ampcheck.facts.values import Companions, CompanionStore
from ampcheck.records import faults
from ampcheck.records.faults import Fault
from ampcheck.records.results import Examination
from ampcheck.shadow.call import Call
from ampcheck.shadow.cause import (
    fault_at,
    follows_from_inputs,
    largest_input,
    largest_of,
    survives,
)

VANISHED, MASKED, COLLIDED, BLURRED = "vanished", "masked", "collided", "blurred"
BOUND, CUT, UNHELD = "bound", "cut", "unheld"
ILL, ERROR, TAKEN = "ill", "error", "taken"

CUTS = "the values that it cuts off"
"""Result that the end of a format reaches."""


class Suspects:
    """Every suspect of a run, by its key."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Fault] = {}

    def add(self, companions: Companions, sort: str, fault: Fault) -> None:
        """Let a suspect travel with values from here on."""
        self._by_key.setdefault(fault.key, fault)
        companions.suspects = {**companions.suspects, sort: fault.key}

    def of(self, before: Sequence[Companions], *sorts: str) -> Iterator[Fault]:
        """The suspects of these sorts that inputs of an op carry."""
        carried = list(filter(attrgetter("suspects"), before))
        for sort in sorts if carried else ():
            for key in dict.fromkeys([c.suspects[sort] for c in carried if sort in c.suspects]):
                yield self._by_key[key]

    def origin_of(self, fault: Fault, call: Call, tensor: torch.Tensor, store: CompanionStore) -> Fault:
        """The fault where it began, if an input of the op carries what explains it."""
        masked = next(self.of(call.before, MASKED), None)
        if masked is not None:
            return caused(fault, masked)
        if not fault.examination.lost or not follows_from_inputs(call, tensor, store):
            return fault
        carriers = [c for c in call.before if VANISHED in c.suspects]
        carriers.sort(key=lambda c: not survives(call, tensor, store, [c]))  # of 0 / 0, the denominator
        zero = next(self.of(carriers, VANISHED), None)
        return caused(fault, zero) if zero is not None else fault


def pass_on(before: Sequence[Companions], results: Sequence[Companions]) -> None:
    """Let results carry the suspects of the inputs."""
    carried: dict[str, Key] = {}
    for companions in before:
        carried |= companions.suspects
    if ERROR in carried:  # of which nothing is determined anyway
        carried.pop(ILL, None)
    for companions in results:
        companions.suspects = carried


def drop(companions: Companions, *sorts: str) -> None:
    """Drop the suspects of these sorts from the values."""
    if not companions.suspects.keys().isdisjoint(sorts):
        companions.suspects = {sort: key for sort, key in companions.suspects.items() if sort not in sorts}


def vanished(call: Call, tensor: torch.Tensor, exact: torch.Tensor) -> Fault | None:
    """The elements that are zero here and not in exact, as a suspect; None without any."""
    gone = exact[tensor == 0]
    gone = gone[(gone != 0) & gone.isfinite()]
    count = gone.numel()
    if not count:
        return None
    seen = Examination(tensor.numel(), zeroed=count, emptied=count == tensor.numel())
    fault = fault_at(faults.ZERO, call, tensor, seen)
    largest = largest_input(call), largest_of(tensor)
    return replace(fault, amax_in=largest[0], amax_out=largest[1], exact_amax=largest_of(gone), elements=count)


def emptied_rows(tensor: torch.Tensor, exact: torch.Tensor, moved: torch.Tensor) -> int:
    """Rows that are zero throughout and not in exact: a safe softmax makes them of a row that is masked whole.

    A row whose values the data leave open, as the gradient of a softmax with a single key, is rounding of float64.
    """
    if not tensor.dim():
        return 0
    known = (exact - moved).abs().amax(-1) < 0.5 * exact.abs().amax(-1)
    return int(((tensor == 0).all(-1) & known).sum())


def place_of(where: Where) -> str:
    """An op with its line."""
    return f"{where.op} at {where.file}:{where.line}" if where.file else where.op


def caused(fault: Fault, suspect: Fault) -> Fault:
    """The fault at the place where it began."""
    place = place_of(fault.where)
    lost = fault.examination.lost
    note = f"{place} makes {lost:,} elements of it infinite or NaN" if lost else f"{place} loses whole rows to it"
    kind = faults.OVERFLOW if suspect.kind == faults.MASK else suspect.kind
    own = suspect.examination.lost or lost
    seen = replace(suspect.examination, lost=own, nan=fault.examination.nan, masked=False)
    return replace(suspect, kind=kind, examination=seen, note=note)
