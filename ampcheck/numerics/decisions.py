"""Discrete decisions: where a float becomes an index, a mask or a whole number.

Two honest precisions may rank two nearly equal experts differently; beyond such a flip their values are no longer the
same quantity. The reference keeps its decisions, the low-precision run compares its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampcheck.nest import tensors
from ampcheck.numerics.distance import relative_error
from ampcheck.record import Where
from ampcheck.trace import OpEvent

_STEPS = frozenset(f"aten::{name}" for name in ("round", "floor", "ceil", "trunc", "sign", "floor_divide", "heaviside"))
_KEPT_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Flip:
    """A decision that the low-precision run took otherwise: `changed` of `numel` elements, at the op `index`.

    error: how far the values that were decided upon lie from the reference's, relative, in the Euclidean norm.
    sensitivity: how far they move there when the data are rounded to the format.
    """

    where: Where
    changed: int
    numel: int
    index: int
    error: float = 0.0
    sensitivity: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What one op decided, and the floating values that it decided upon."""

    where: Where
    index: int
    chosen: torch.Tensor
    values: tuple[torch.Tensor, ...]


class Decisions:
    """An observer of `ampcheck.trace.Trace` that keeps what was decided, in order, by module call and op."""

    def __init__(self) -> None:
        self.made: dict[tuple[str, int, str, int], Decision] = {}
        self._count: dict[tuple[str, int, str], int] = {}

    def before(self, op: Any, args: Any, kwargs: Any) -> None:
        """Nothing is needed before an op runs."""

    def after(self, event: OpEvent, op: Any, args: Any, kwargs: Any, out: Any, held: Any) -> None:
        """Keep the decision, if this op takes one."""
        if event.phase != "forward" or op.is_view:
            return
        values = [t for _, t in tensors((args, kwargs)) if t.is_floating_point() and 0 < t.numel() <= _KEPT_ELEMENTS]
        if not values:
            return
        stepped = op._schema.name in _STEPS
        for _, result in tensors(out):
            discrete = not result.is_floating_point() and not result.is_complex()
            if (discrete or stepped) and 0 < result.numel() <= _KEPT_ELEMENTS and result.layout is torch.strided:
                key = (event.module, event.call, event.op)
                number = self._count.get(key, 0)
                self._count[key] = number + 1
                chosen = result.detach().to(torch.float64) if stepped else result.clone()
                kept = tuple(value.detach().clone() for value in values if value.layout is torch.strided)
                self.made[(*key, number)] = Decision(event.where, event.index, chosen, kept)

    def flips(self, low: Decisions, moved: Sequence[Decisions] = ()) -> tuple[Flip, ...]:
        """Which of the decisions of `low` differ from these, in the order in which they were taken.

        moved: the decisions of the reference with its data rounded, from which the sensitivities follow.
        """
        found = []
        for key, taken in low.made.items():
            wanted = self.made.get(key)
            if wanted is None:
                continue
            if wanted.chosen.shape != taken.chosen.shape:
                changed = taken.chosen.numel()
            else:
                changed = int((wanted.chosen != taken.chosen).sum())
            if changed:
                swayed = (_distance(other.made[key].values, wanted.values) for other in moved if key in other.made)
                found.append(
                    Flip(
                        taken.where,
                        changed,
                        taken.chosen.numel(),
                        taken.index,
                        _distance(taken.values, wanted.values),
                        max(swayed, default=0.0),
                    )
                )
        return tuple(sorted(found, key=lambda flip: flip.index))


def _distance(values: Sequence[torch.Tensor], wide: Sequence[torch.Tensor]) -> float:
    pairs = [pair for pair in zip(values, wide, strict=False) if pair[0].shape == pair[1].shape]
    return max((relative_error(value, twin.double()) for value, twin in pairs), default=math.inf)
