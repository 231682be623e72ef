"""16-bit weights that the loop writes beside their float32 masters, which then overwrite them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ampcheck.training.loop import TrainingLoop, plain_values

_FAR = 0.02
"""Relative, in the Euclidean norm: a weight this far from its master is not its rounded value (0.004 in bfloat16)."""

_FOLLOWED = 0.5
"""The part of that distance from which a step of the master counts as taking up what was written."""

_PAIRED = 2
"""Steps after which masters are looked for."""


@dataclass(slots=True)
class _Apart:
    """A weight that is not the rounded value of its master before a step, and both values."""

    name: str
    weight: torch.Tensor
    master: torch.Tensor
    weight_before: torch.Tensor
    master_before: torch.Tensor


class MasterWatch:
    """Watches weights that no optimizer holds and that become the rounded values of tensors that one steps.

    reached: whether backward gave a gradient, by the id of a parameter. overwritten: by the name of a weight that was
    written to and got the value of its master again, the step in which it did.
    """

    def __init__(self, loop: TrainingLoop, reached: Mapping[int, bool]) -> None:
        self.overwritten: dict[str, int] = {}
        self._loop, self._reached = loop, reached
        self._masters: dict[str, torch.Tensor] = {}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._apart: list[_Apart] = []
        self._steps = 0

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the weights with their masters before an optimizer steps these."""
        weights = self._weights()
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        wide = {id(p): p for p in stepped if p.dtype is torch.float32} if weights else {}
        if self._steps < _PAIRED and wide:
            tensors = (*weights.values(), *wide.values())
            self._before = {id(t): (t, plain_values(t.detach()).clone()) for t in tensors}
        for name, weight in weights.items():
            master = self._masters.get(name)
            if master is not None and id(master) in wide and _far(plain_values(weight), plain_values(master)):
                values = (plain_values(t.detach()).clone() for t in (weight, master))
                self._apart.append(_Apart(name, weight, master, *values))

    @torch.no_grad()
    def ended(self, step: int) -> None:
        """Look at what a step left of the weights."""
        if self._before:
            self._pair()
        for apart in self._apart:
            now, master = plain_values(apart.weight), plain_values(apart.master)
            written = (apart.weight_before.double() - apart.master_before).norm()
            followed = (master.double() - apart.master_before).norm()
            if torch.equal(now, master.to(now.dtype)) and bool(followed < _FOLLOWED * written):
                self.overwritten.setdefault(apart.name, step)
        self._apart.clear()
        self._before.clear()
        self._steps += 1

    def _weights(self) -> dict[str, torch.nn.Parameter]:
        optimizers = self._loop.optimizers.values()
        optimized = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        return {
            name: p
            for name, p in self._loop.parameters()
            if id(p) not in optimized and p.is_floating_point() and p.dtype.itemsize == 2 and self._reached.get(id(p))
        }

    def _pair(self) -> None:
        """Find the masters of weights: those of which a weight is the rounded value."""
        wide = [t for t, _ in self._before.values() if t.dtype is torch.float32]
        for name, weight in self._weights().items():
            if name in self._masters or id(weight) not in self._before:
                continue
            now = plain_values(weight)
            same = (m for m in wide if m.shape == weight.shape and torch.equal(now, plain_values(m).to(now.dtype)))
            if (master := next(same, None)) is not None and bool(now.any()):
                self._masters[name] = master
                before, master_before = self._before[id(weight)][1], self._before[id(master)][1]
                if _far(before, master_before):
                    self._apart.append(_Apart(name, weight, master, before, master_before))


def _far(weight: torch.Tensor, master: torch.Tensor) -> bool:
    distance = (weight.detach().double() - master.detach()).norm()
    return bool(distance > _FAR * master.detach().double().norm())
