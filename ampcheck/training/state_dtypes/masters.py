"""16-bit weights and their float32 masters: what is written beside these, and gradients that are not of their step."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ampcheck.training.loop import TrainingLoop, plain_values
from ampcheck.training.state_dtypes.measure import sum_of_bits

_FAR = 0.02
"""Relative, in the Euclidean norm: a weight this far from its master is not its rounded value (0.004 in bfloat16)."""

_FOLLOWED = 0.5
"""The part of that distance from which a step of the master counts as taking up what was written."""

_PAIRED = 2
"""Steps after which masters are looked for."""

_SURE = 16
"""Elements from which a gradient that was written to, and has the same bits, was multiplied by 1, as by a clip."""


@dataclass(frozen=True, slots=True)
class _Gradient:
    """A gradient before a step. bits: the sum of those of its elements, 0 where all are zero or there is none."""

    tensor: weakref.ref[torch.Tensor] | None
    version: int
    elements: int
    bits: int

    @classmethod
    def of(cls, parameter: torch.Tensor) -> _Gradient:
        if parameter.grad is None:
            return cls(None, 0, 0, 0)
        values = plain_values(parameter.grad).detach()
        bits = sum_of_bits(values) if bool(values.any()) else 0
        return cls(weakref.ref(parameter.grad), parameter.grad._version, values.numel(), bits)

    def stays(self, before: _Gradient) -> bool:
        """Whether this is the gradient of before, to which nothing was added; few elements may agree by chance."""
        same = self.tensor is not None and before.tensor is not None and self.tensor() is before.tensor()
        return same and self.bits == before.bits != 0 and (self.version == before.version or self.elements >= _SURE)


class MasterWatch:
    """Watches weights that no optimizer holds and that become the rounded values of tensors that one steps.

    reached: whether backward gave a gradient, by the id of a parameter. overwritten: by the name of a weight that was
    written to and got the value of its master again, the step in which it did. stale: by the name of a weight whose
    gradient changed, the step in which its master was stepped with the gradient of the step before.
    """

    def __init__(self, loop: TrainingLoop, reached: Mapping[int, bool]) -> None:
        self.overwritten: dict[str, int] = {}
        self.stale: dict[str, int] = {}
        self._gradients: dict[tuple[int, int], _Gradient] = {}  # by optimizer and weight, at its last step
        self._loop, self._reached = loop, reached
        self._masters: dict[str, torch.Tensor] = {}
        self._narrow: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # weights, and their values before the step
        self._wide: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._steps = 0

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the weights that are not the rounded values of their masters before an optimizer steps these; in the
        first steps also those whose masters are not known, and all that may be one."""
        weights = self._weights()
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        wide = {id(p): p for p in stepped if p.dtype is torch.float32} if weights else {}
        early = self._steps < _PAIRED and bool(wide)
        if wide:
            self._look_at_gradients(optimizer, weights, wide)
        for name, weight in weights.items():
            master = self._masters.get(name)
            if master is None and early:
                self._narrow[name] = weight, plain_values(weight).clone()
            elif master is not None and id(master) in wide and _far(plain_values(weight), plain_values(master)):
                self._narrow[name] = weight, plain_values(weight).clone()
                self._wide[id(master)] = master, plain_values(master).clone()
        if early:
            self._wide |= {number: (p, plain_values(p).clone()) for number, p in wide.items()}

    @torch.no_grad()
    def ended(self, step: int) -> None:
        """Look at what a step left of the weights. The master of one is the tensor of which it is the rounded value."""
        for name, (weight, before) in self._narrow.items():
            now = plain_values(weight)
            for wide, _ in self._wide.values() if name not in self._masters and bool(now.any()) else ():
                if wide.shape == weight.shape and torch.equal(now, plain_values(wide).to(now.dtype)):
                    self._masters[name] = wide
                    break
            master = self._masters.get(name)
            if master is None or id(master) not in self._wide:
                continue
            values, master_before = plain_values(master), self._wide[id(master)][1]
            written = (before.double() - master_before).norm()
            followed = (values.double() - master_before).norm()
            rounded = torch.equal(now, values.to(now.dtype))
            if rounded and _far(before, master_before) and bool(followed < _FOLLOWED * written):
                self.overwritten.setdefault(name, step)
        self._narrow.clear()
        self._wide.clear()
        self._steps += 1

    def _look_at_gradients(
        self, optimizer: torch.optim.Optimizer, weights: Mapping[str, torch.Tensor], wide: Mapping[int, torch.Tensor]
    ) -> None:
        """Compare the gradients of masters and of their weights with those of the last step of the optimizer."""
        known, number = self._gradients, id(optimizer)
        now = {(number, id(p)): _Gradient.of(p) for p in (*weights.values(), *wide.values())}
        for name, weight in weights.items():
            key, master = (number, id(weight)), (number, id(self._masters.get(name)))
            seen = master in now and master in known and key in known
            if seen and now[master].stays(known[master]) and now[key].bits != known[key].bits:
                self.stale.setdefault(name, self._steps)
        known.update(now)

    def _weights(self) -> dict[str, torch.nn.Parameter]:
        optimizers = self._loop.optimizers.values()
        optimized = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        return {
            name: p
            for name, p in self._loop.parameters()
            if id(p) not in optimized and p.is_floating_point() and p.dtype.itemsize == 2 and self._reached.get(id(p))
        }


def _far(weight: torch.Tensor, master: torch.Tensor) -> bool:
    distance = (weight.detach().double() - master.detach()).norm()
    return bool(distance > _FAR * master.detach().double().norm())
