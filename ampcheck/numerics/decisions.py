"""Discrete decisions: where a float becomes an index, a mask or a whole number.

Two honest precisions may rank two nearly equal experts differently; beyond such a flip their values are no longer the
same quantity. The reference keeps its decisions, the low-precision run compares its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ampcheck.nest import tensors
from ampcheck.record import Where
from ampcheck.trace import OpEvent

_STEPS = frozenset(f"aten::{name}" for name in ("round", "floor", "ceil", "trunc", "sign", "floor_divide", "heaviside"))
_KEPT_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Flip:
    """A decision that the low-precision run took otherwise: `changed` of `numel` elements, at the op `index`."""

    where: Where
    changed: int
    numel: int
    index: int


class Decisions:
    """An observer of `ampcheck.trace.Trace` that keeps what was decided, in order, by module call and op."""

    def __init__(self) -> None:
        self.made: dict[tuple[str, int, str, int], tuple[OpEvent, torch.Tensor]] = {}
        self._count: dict[tuple[str, int, str], int] = {}

    def before(self, op: Any, args: Any, kwargs: Any) -> None:
        """Nothing is needed before an op runs."""

    def after(self, event: OpEvent, op: Any, args: Any, kwargs: Any, out: Any, held: Any) -> None:
        """Keep the decision, if this op takes one."""
        if event.phase != "forward" or op.is_view:
            return
        given = [t for _, t in tensors((args, kwargs))]
        if not any(t.is_floating_point() for t in given):
            return
        stepped = op._schema.name in _STEPS
        for _, result in tensors(out):
            discrete = not result.is_floating_point() and not result.is_complex()
            if (discrete or stepped) and 0 < result.numel() <= _KEPT_ELEMENTS and result.layout is torch.strided:
                key = (event.module, event.call, event.op)
                number = self._count.get(key, 0)
                self._count[key] = number + 1
                self.made[(*key, number)] = (event, result.detach().to(torch.float64) if stepped else result.clone())

    def flips(self, low: Decisions) -> tuple[Flip, ...]:
        """Which of the decisions of `low` differ from these, in the order in which they were taken."""
        found = []
        for key, (event, chosen) in low.made.items():
            if key not in self.made:
                continue
            wanted = self.made[key][1]
            if wanted.shape != chosen.shape:
                found.append(Flip(event.where, chosen.numel(), chosen.numel(), event.index))
            elif changed := int((wanted != chosen).sum()):
                found.append(Flip(event.where, changed, chosen.numel(), event.index))
        return tuple(sorted(found, key=lambda flip: flip.index))
