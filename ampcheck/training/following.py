"""Follows the steps of a loop under one shadow: gradients, updates, sums and moments.

In a loop that is handed over by its parts each step is judged by itself: it begins with the values that parameters and
state really have, so that `exact` is what this step should have made of them. Sums that go on over steps, and
gradients, are followed from their beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice

import torch

from ampcheck.core.run import Where
from ampcheck.facts.memory import has_companions
from ampcheck.records.faults import OVERFLOW
from ampcheck.records.protocol import same_loss
from ampcheck.records.state import Role
from ampcheck.torchtools.private import NO_DISPATCH
from ampcheck.torchtools.storage import local
from ampcheck.training.gradients.watch import GradientWatch
from ampcheck.training.lineage import Lineage
from ampcheck.training.loop import LoopShadow, Resident, TrainingLoop, first_nonfinite
from ampcheck.training.protocol.recorder import Recorder
from ampcheck.training.reductions.sums import ReductionWatch
from ampcheck.training.scale.degrees import Degrees
from ampcheck.training.stagnation.updates import UpdateWatch
from ampcheck.training.state_dtypes.moments import MomentWatch

UPDATES = 4
"""Updates of each tensor that are followed."""

_RENEWED = (Role.PARAMETER, Role.STATE, Role.BUFFER, Role.COPY)


class Following:
    """Follows the steps of a loop: what became of gradients, updates and sums, and where values left their range.

    shadow: that of the block around the steps, whose companions go on from step to step; without one, what lives across
    steps begins each step with the values that it really has. places: by step the op in which a value first became
    infinite or NaN; undefined: the steps in which float64 does as well; exact: by step what it would have returned,
    where that is known. degrees: how gradients depend on the loss scale.
    """

    def __init__(self, loop: TrainingLoop, recorder: Recorder, shadow: LoopShadow | None = None) -> None:
        self.shadow = LoopShadow(steps=True) if shadow is None else shadow
        self.sums = ReductionWatch(self.shadow)
        self.moments = MomentWatch(self.shadow, loop)
        self.lineage = Lineage(self.sums, self.moments)
        self.updates = UpdateWatch(self.shadow, self.lineage, UPDATES)
        self.gradients = GradientWatch(loop, recorder)
        self.degrees = self.shadow.degrees = Degrees(recorder, self.shadow.store)
        self.places: dict[int, Where] = {}
        self.exact: dict[int, float] = {}
        self.undefined: set[int] = set()
        self._followed = self._poisoned = False
        self._loop, self._restarts = loop, shadow is None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Follow the step that runs inside."""
        with self.begun(number), self.shadow, self.lineage if self.lineage.active else nullcontext():
            yield

    @contextmanager
    def begun(self, number: int) -> Iterator[None]:
        """Compare what the step that runs inside does; shadow and lineage are entered by the caller."""
        residents = floating_residents(self._loop)
        for resident in residents if self._restarts else ():
            if resident.role in _RENEWED and has_companions(resident.tensor):
                self.shadow.renew(resident.tensor)
        judge, before = self.shadow.judge, self.shadow.ops
        known = 0 if judge is None else len(judge.results.nonfinite)
        self.shadow.numbers.clear()
        if judge is not None:
            judge.results.largest.clear()
        self._followed = self.updates.begin(residents, self._loop)
        self.lineage.active = self._followed or self.sums.goes_on
        if self._followed:
            self.moments.start(residents)
        with self.gradients.step(number, self.shadow):
            yield
        overflows = (f.where for f in self.shadow.faults if f.kind == OVERFLOW and f.index > before)
        overflow = next(overflows, None)
        place = overflow or (None if judge is None else next(islice(judge.results.nonfinite, known, None), None))
        defined = place is None or overflow is not None
        place = place or first_nonfinite(self.shadow, (t for _, p in self._loop.parameters() for t in (p, p.grad)))
        if place is not None and not self._poisoned:  # else from what an earlier step applied to the weights
            self.places[number] = place
            self.undefined |= set() if defined else {number}
            self._poisoned = any(not bool(local(p.detach()).isfinite().all()) for _, p in self._loop.parameters())

    def ended(self, number: int, value: float) -> None:
        """Record a completed step and the value that it returned."""
        residents = floating_residents(self._loop)
        self.updates.end(residents)
        if self._followed:
            self.moments.end(residents)
        self.updates.look(residents)
        if same := [exact for real, exact in self.shadow.numbers if same_loss(real, value)]:
            self.exact[number] = same[-1]


def floating_residents(loop: TrainingLoop) -> list[Resident]:
    """The floating tensors that live across steps; of a DTensor the local shard, which is what its ops run on."""
    floating = []
    with torch.no_grad():
        for resident in loop.residents():
            tensor = resident.tensor
            if tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_meta:
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                plain = type(local).__torch_dispatch__ is NO_DISPATCH
                if plain or resident.role is not Role.STATE:  # state of a packed format has not every op
                    floating.append(replace(resident, tensor=local))
    return floating
