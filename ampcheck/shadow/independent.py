"""A shadow whose exact values depend on the data alone: exact takes the decisions, and the run takes those of exact.

Companions follow the decisions of the run otherwise, since it is the run that is judged. Two honest runs of one
function decide otherwise near a tie and at a kink, and their exact values part there. Here comparisons, indices,
integers and numbers that leave the run are those of *exact*, so that exact values are equal wherever the functions are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from ampcheck.core.errors import OP_ERRORS
from ampcheck.core.run import Where
from ampcheck.facts.sides import Change
from ampcheck.shadow.call import Call, leaves
from ampcheck.shadow.follower import Follower
from ampcheck.shadow.mode import Shadow
from ampcheck.torchtools.modes import aside
from ampcheck.torchtools.pytree import map_tensors


class ObservedShadow(Shadow):
    """A shadow that calls `observer` with each op that it has followed; what the observer raises reaches the caller.

    independent: exact takes the decisions. The values of the run are then those of no run of the user's, and are not
    judged; its exact values are what float64 gives, also of weights from one step to the next. change: gives data
    other exact values.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        *,
        independent: bool = False,
        judge: bool = True,
        freedom: bool = False,
        change: Change | None = None,
    ) -> None:
        super().__init__(model, judge=judge, freedom=freedom, renews=not independent)
        self.store.change = change
        self.observer: Callable[[Call], None] | None = None
        self._independent = independent
        self._follower = Follower(self.store, self._sides, self.unruled, independent=independent)

    def _find_results(self, call: Call, storages: Collection[int]) -> None:
        if self._independent and call.before and not (call.traits.writes or call.traits.random):
            with aside():
                call.out = self._decided(call)
        super()._find_results(call, storages)

    def _follow(self, call: Call, where: Where) -> None:
        super()._follow(call, where)
        if self.observer is not None:
            with aside():
                self.observer(call)

    def _decided(self, call: Call) -> Any:
        """Return what an op returns: of one that decides, what it gives on exact values, rounded to the formats of the
        run."""
        out = leaves((call.out,))
        if out and all(t.is_floating_point() or t.is_complex() for t in out):
            return call.out
        try:
            exact = self._sides[0].run(call)
        except (*OP_ERRORS, NotImplementedError):  # without a kernel for float64
            return call.out
        dtypes = iter([t.dtype for t in out])
        return map_tensors(lambda t: t.to(next(dtypes)), exact) if out else exact
