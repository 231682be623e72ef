"""Both sides of the companions of a storage, and what they are made of when an op uses them first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch

_PIECE = 1 << 16

Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Makes other values of flat data."""


class Values:
    """Both sides of a storage, flat, which several companions share until one writes: exact float64, moved float32."""

    __slots__ = ("exact", "moved", "owners")

    def __init__(self, exact: torch.Tensor, moved: torch.Tensor) -> None:
        self.exact, self.moved, self.owners = exact, moved, 1

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.exact.nbytes + self.moved.nbytes


class Entering:
    """Data of the run. move: what moves them; None where they are no data. change: gives them other exact values."""

    __slots__ = ("change", "move", "numel")
    nbytes = 0

    def __init__(self, numel: int, move: Change | None, change: Change | None = None) -> None:
        self.numel, self.move, self.change = numel, move, change

    def values(self, real: torch.Tensor) -> Values:
        """The present values of the run."""
        moved = real.to(torch.float32, copy=self.move is None)
        exact, moved = real.to(torch.float64, copy=True), moved if self.move is None else self.move(moved)
        if self.change is None:
            return Values(exact, moved)
        other = self.change(exact)
        return Values(other, moved + (other - exact).nan_to_num(0.0).float())


class Resting:
    """Values that live from one step to the next: exact, and how far moved lies from it, in bfloat16."""

    __slots__ = ("apart", "exact")

    def __init__(self, values: Values) -> None:
        self.exact, self.apart = values.exact, torch.empty_like(values.moved, dtype=torch.bfloat16)
        for exact, moved, apart in _pieces(values.exact, values.moved, self.apart):
            apart.copy_(moved - exact.float())
            if not math.isfinite(apart.sum().item()):
                apart.masked_fill_(exact.isinf(), 0.0)

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.exact.nbytes + self.apart.nbytes

    def values(self, real: torch.Tensor) -> Values:
        """The values as they were."""
        values = Values(self.exact, torch.empty_like(self.exact, dtype=torch.float32))
        for exact, moved, apart in _pieces(self.exact, values.moved, self.apart):
            moved.copy_(exact).add_(apart)
        return values


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Flat tensors in pieces that stay in the cache of a processor."""
    return zip(*(torch.split(tensor, _PIECE) for tensor in tensors), strict=True)
