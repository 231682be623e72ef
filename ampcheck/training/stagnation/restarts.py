"""Which sums start anew now and then: what adds up without end stops growing, what is cleared in time does not."""

from __future__ import annotations

import torch

from ampcheck.training.loop import Role, TrainingLoop

_FALLS = 0.99
"""A sum of increments of one sign never becomes smaller; below this part of what it was, it was cleared."""

_ADDS = (Role.BUFFER, Role.COPY, Role.STATE, Role.OTHER)


class Restarts:
    """Look at the 16-bit tensors of a loop after each step; `names` are those whose magnitude fell."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._before: dict[str, float] = {}

    def look(self, loop: TrainingLoop) -> None:
        """Note the magnitude of each tensor; a DTensor's is that of its shard."""
        with torch.no_grad():
            for one in loop.residents():
                tensor = one.tensor.to_local() if hasattr(one.tensor, "to_local") else one.tensor
                if one.role not in _ADDS or not tensor.is_floating_point() or tensor.dtype.itemsize != 2:
                    continue
                now = float(tensor.abs().sum(dtype=torch.float64))
                if now < _FALLS * self._before.get(one.name, 0.0):
                    self.names.add(one.name)
                self._before[one.name] = now
