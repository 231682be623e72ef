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

from ampcheck.core.run import Where
from ampcheck.numerics.distance import relative_error
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.trace import OpEvent

_STEPS = frozenset(f"aten::{name}" for name in ("round", "floor", "ceil", "trunc", "sign", "floor_divide", "heaviside"))
_SELECTS = frozenset(f"aten::{name}" for name in ("topk", "sort", "max", "min", "kthvalue", "median", "mode"))
_RANKS = _SELECTS | {
    f"aten::{name}" for name in ("argmax", "argmin", "argsort", "max_pool2d_with_indices", "max_pool3d_with_indices")
}
_NEAR = 0.125  # of the root mean square: three bits, the digits that 16-bit scores have in the worst case
_KEPT_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Flip:
    """A decision that the low-precision run took otherwise: `changed` of `numel` elements, at the op `index`.

    error: how far the values that were decided upon lie from the reference's, relative, in the Euclidean norm.
    sensitivity: how far they move there when the data are rounded to the format. ranks: whether the op puts values in
    order instead of holding them against a threshold or an integer. float32: the error that float32 has there.
    """

    where: Where
    changed: int
    numel: int
    index: int
    error: float = 0.0
    sensitivity: float = 0.0
    ranks: bool = False
    float32: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What one op decided, and the floating values that it decided upon."""

    where: Where
    index: int
    chosen: torch.Tensor
    values: tuple[torch.Tensor, ...]


class Decisions:
    """An observer of `ampcheck.torchtools.trace.Trace` that keeps what was decided, in order, by module call and op.

    forced: decisions of another run that are to be taken here as well, where the shapes agree.
    """

    def __init__(self, forced: Decisions | None = None) -> None:
        self.made: dict[tuple[str, int, str, int], Decision] = {}
        self.kinks: dict[tuple[str, int, str, int], torch.Tensor] = {}
        self._forced = forced
        self._count: dict[tuple[str, int, str], int] = {}

    def before(self, op: object, args: object, kwargs: object) -> None:
        """Nothing is needed before an op runs."""

    def after(self, event: OpEvent, op: Any, args: Any, kwargs: Any, out: Any, held: Any) -> Any:
        """Keep the decision, if this op takes one; give the forced one instead, if there is one."""
        if event.phase == "forward" and op._schema.name in ("aten::relu", "aten::relu_"):
            return self._kink(event, op, out)
        if event.phase != "forward" or op.is_view or op._schema.is_mutable:
            return None
        values = [t for _, t in tensors((args, kwargs)) if t.is_floating_point() and 0 < t.numel() <= _KEPT_ELEMENTS]
        stepped = op._schema.name in _STEPS
        chosen = next((t for _, t in tensors(out) if _is_choice(t, stepped)), None)
        if not values or chosen is None:
            return None
        key = (event.module, event.call, event.op)
        number = self._count.get(key, 0)
        self._count[key] = number + 1
        kept = tuple(value.detach().clone() for value in values if value.layout is torch.strided)
        wanted = self._forced.made.get((*key, number)) if self._forced is not None else None
        replaced = None
        if wanted is not None and wanted.chosen.shape == chosen.shape:
            replaced = _taking(wanted.chosen.to(chosen.dtype), op, args, kwargs, out)
            chosen = wanted.chosen
        self.made[(*key, number)] = Decision(event.where, event.index, chosen.detach().clone(), kept)
        return replaced

    def _kink(self, event: OpEvent, op: Any, out: torch.Tensor) -> torch.Tensor | None:
        """Which side of its kink a ReLU is on: forward hardly moves there, and the gradient jumps.

        A forced side is taken where the value is small beside the others; what lies far from zero is no near tie.
        """
        number = self._count.get((event.module, event.call, "kink"), 0)
        self._count[event.module, event.call, "kink"] = number + 1
        key = (event.module, event.call, "kink", number)
        self.kinks[key] = out > 0
        wanted = self._forced.kinks.get(key) if self._forced is not None else None
        if wanted is None or wanted.shape != out.shape or not out.numel():
            return None
        turned = (wanted != self.kinks[key]) & (out <= _NEAR * out.square().mean().sqrt())
        self.kinks[key] = self.kinks[key] ^ turned
        moved = torch.where(turned & wanted, torch.finfo(out.dtype).tiny, torch.where(turned, 0.0, out))
        return out.copy_(moved) if op._schema.is_mutable else moved

    def flips(
        self, low: Decisions, moved: Sequence[Decisions] = (), float32: Decisions | None = None
    ) -> tuple[Flip, ...]:
        """Which of the decisions of `low` differ from these, in the order in which they were taken.

        moved: the decisions of the reference with its data rounded, from which the sensitivities follow; float32: those
        of the model in float32.
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
                        ranks=taken.where.op.partition(".")[0] in _RANKS,
                        float32=_distance(float32.made[key].values, wanted.values)
                        if float32 is not None and key in float32.made
                        else 0.0,
                    )
                )
        return tuple(sorted(found, key=lambda flip: flip.index))


def _is_choice(tensor: torch.Tensor, stepped: bool) -> bool:
    discrete = not tensor.is_floating_point() and not tensor.is_complex()
    return (discrete or stepped) and 0 < tensor.numel() <= _KEPT_ELEMENTS and tensor.layout is torch.strided


def _taking(chosen: torch.Tensor, op: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """The result of an op had it chosen so: values that come with indices are taken from where these point."""
    if not isinstance(out, (tuple, list)):
        return chosen
    named = {a.name: v for a, v in zip(op._schema.arguments, args, strict=False)} | kwargs
    values, indices = out[0], out[1]
    dim = named.get("dim", -1)
    if op._schema.name in _SELECTS and isinstance(dim, int):
        keep = values.dim() == args[0].dim()
        picked = args[0].gather(dim, chosen if keep else chosen.unsqueeze(dim))
        return (picked if keep else picked.squeeze(dim)), chosen
    return tuple(chosen if item is indices else item for item in out)


def _distance(values: Sequence[torch.Tensor], wide: Sequence[torch.Tensor]) -> float:
    pairs = [pair for pair in zip(values, wide, strict=False) if pair[0].shape == pair[1].shape]
    return max((relative_error(value, twin.double()) for value, twin in pairs), default=math.inf)
