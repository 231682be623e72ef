"""The observed steps of a loop under one shadow.

Each step is judged by itself: it begins with the values that parameters and state really have, so that `exact` is what
this step should have made of them. Sums that go on over steps, and gradients, are followed from their beginning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from ampcheck.core.run import Where
from ampcheck.shadow.companions import has_companions
from ampcheck.shadow.faults import OVERFLOW
from ampcheck.training.gradients.watch import GradientWatch
from ampcheck.training.lineage import Lineage
from ampcheck.training.loop import Resident, Role, TrainingLoop
from ampcheck.training.loop_shadow import LoopShadow, first_nonfinite
from ampcheck.training.reductions.sums import ReductionWatch
from ampcheck.training.stagnation.updates import UpdateWatch

UPDATES = 4
"""How many steps are followed update by update."""

_RENEWED = (Role.PARAMETER, Role.STATE, Role.BUFFER, Role.COPY)


class Following:
    """Follows the steps of a loop: what became of gradients, updates and sums, and where values left their range.

    updates: how many steps are followed update by update. places: by step the op in which a value first became infinite
    or NaN; exact: by step what it would have returned, where that is known.
    """

    def __init__(self, loop: TrainingLoop, gradients: GradientWatch | None = None, updates: int = UPDATES) -> None:
        self.shadow = LoopShadow()
        self.sums = ReductionWatch(self.shadow)
        self.lineage = Lineage(self.sums)
        self.updates = UpdateWatch(self.shadow, self.lineage)
        self.gradients = gradients
        self.places: dict[int, Where] = {}
        self.exact: dict[int, float] = {}
        self._loop, self._steps = loop, updates

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Follow the step that runs inside."""
        residents = floating_residents(self._loop)
        for resident in residents:
            if resident.role in _RENEWED and has_companions(resident.tensor):
                self.shadow.renew(resident.tensor)
        before, nonfinite = self.shadow.ops, len(self._nonfinite())
        self.shadow.numbers.clear()
        if self.shadow.judge is not None:
            self.shadow.judge.largest.clear()
        followed = number < self._steps
        if followed:
            self.updates.begin(residents)
        with ExitStack() as stack:
            if self.gradients is not None and self.gradients.wanted:
                stack.enter_context(self.gradients.step(number, self.shadow))
            stack.enter_context(self.shadow)
            if followed:
                stack.enter_context(self.lineage)
            yield
        overflows = (f.where for f in self.shadow.faults if f.kind == OVERFLOW and f.index > before)
        place = next(overflows, next(iter(self._nonfinite()[nonfinite:]), None))
        place = place or first_nonfinite(self.shadow, (t for _, p in self._loop.parameters() for t in (p, p.grad)))
        if place is not None:
            self.places[number] = place

    def ended(self, number: int, value: float) -> None:
        """Book a step that came to its end and returned a value."""
        residents = floating_residents(self._loop)
        if number < self._steps:
            self.updates.end(residents)
        self.updates.look(residents)
        same = [e for v, e in self.shadow.numbers if v == value or (math.isnan(v) and math.isnan(value))]
        if same:
            self.exact[number] = same[-1]

    def _nonfinite(self) -> list[Where]:
        return list(self.shadow.judge.nonfinite) if self.shadow.judge is not None else []


def floating_residents(loop: TrainingLoop) -> list[Resident]:
    """The floating tensors that live across steps; of a DTensor the local shard, which is what its ops run on."""
    floating = []
    with torch.no_grad():
        for resident in loop.residents():
            tensor = resident.tensor
            if tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_meta:
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                floating.append(replace(resident, tensor=local))
    return floating
