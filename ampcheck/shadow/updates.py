"""Updates that a weight of 16 bits cannot take up, and what vanished from others on the way to it."""

from __future__ import annotations

from dataclasses import replace

import torch

from ampcheck.facts.history import Key
from ampcheck.facts.memory import has_companions, roundoff
from ampcheck.facts.values import CompanionStore
from ampcheck.records import faults
from ampcheck.records.results import Examination
from ampcheck.shadow.call import Call
from ampcheck.shadow.cause import fault_at
from ampcheck.shadow.found import Found
from ampcheck.shadow.norms import error_square, relative_error
from ampcheck.shadow.suspects import UNHELD

_LOST_UPDATE = 0.5
"""The part of an update from which it is lost."""

_VANISHING = (faults.FLUSH, faults.ZERO)
_VANISHED_SHARE = 0.05
"""The relative error of an update of a weight from which what vanished from it counts."""


class UpdateJudge:
    """Judges how much of the values that they add in-place ops of the run lose."""

    def __init__(self, store: CompanionStore, found: Found) -> None:
        self._store, self._found = store, found
        self._unheld: set[Key] = set()
        self._compensates = False

    def judge(self, call: Call) -> None:
        """Look at an op of forward or of an optimizer that writes and reads floating tensors."""
        if call.where.phase != "backward" and call.written:
            if is_weight := any(t.requires_grad and t.is_leaf for t in call.written):
                self._vanish(call)
            self._lose(call, persists=is_weight or not any(c.depth for c in call.before[:1]))
        self._use_weights(call)

    def compensate(self) -> None:
        """Take back what is not held: the code looks at what arrived, and adds the rest later."""
        self._compensates = True
        self._found.forget(self._unheld)

    def _vanish(self, call: Call) -> None:
        """Record what vanished from an update that a weight could take up: the weight itself hardly shows it."""
        written = {id(tensor) for tensor in call.written}
        keeps = sum(float(torch.linalg.vector_norm(t.detach()).double() * roundoff(t.dtype)) ** 2 for t in call.written)
        for tensor, companions in zip(call.inputs, call.before, strict=True):
            if id(tensor) in written or not companions.faults or relative_error(tensor, self._store) <= _VANISHED_SHARE:
                continue
            for fault in self._found.known(companions.faults) if error_square(tensor, self._store) > keeps else ():
                if fault.kind in _VANISHING and fault.where.phase != "backward":
                    self._found.reached.note(fault.key, "an update of a weight")

    def _lose(self, call: Call, *, persists: bool) -> None:
        """Record what is added to 16-bit values that do not hold it. persists: to a weight, or to data that entered;
        other values may be those of a weight once they are used."""
        if not self._compensates and (lost := _lost_update(call)) > _LOST_UPDATE:
            seen = Examination(call.written[0].numel(), error=lost, limit=_LOST_UPDATE, impact=lost)
            note = "most of what is added is below half of the spacing of the values, which stay as they were"
            fault = replace(fault_at(faults.DRIFT, call, call.written[0], seen), note=note)
            if persists:
                self._unheld.add(fault.key)
                self._found.add(fault, "what it was added to")
            else:
                self._found.suspects.add(call.before[0], UNHELD, fault)

    def _use_weights(self, call: Call) -> None:
        """Record what was added in vain to values that turn out to be those of a weight."""
        for tensor, companions in zip(call.inputs, call.before, strict=True):
            if UNHELD not in companions.suspects or self._compensates:
                continue
            used = tensor if tensor._base is None else tensor._base
            if used.requires_grad and used.is_leaf:
                for fault in self._found.suspects.of([companions], UNHELD):
                    self._unheld.add(fault.key)
                    self._found.accuse(fault, "what it was added to")


def _lost_update(call: Call) -> float:
    """Which part of what is added to 16-bit values, which have no gradient, they cannot take up."""
    if call.name not in ("add_", "sub_") or call.args[0].itemsize > 2:
        return 0.0
    weight, update = call.args[:2]
    if weight.is_leaf and weight.grad is not None:  # training, of which `stagnation` judges all steps
        return 0.0
    if not has_companions(update) or update.numel() <= 1:
        return 0.0
    update = (update.detach().double() * call.argument("alpha", 1)).expand_as(weight)
    gone = update.abs() <= weight.detach().double().abs() * roundoff(weight.dtype)
    return float(torch.linalg.vector_norm(update[gone]) / torch.linalg.vector_norm(update).clamp_min(1e-300))
