"""Companions of a few rows of a large matrix, such as the table of an embedding.

The rows that no op has read have no companions: as yet the run has done nothing to them, so their values are exact. Ops
that read or write single rows, and elementwise ops, are followed by rows; any other op needs companions of all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ampcheck.facts.sides import Entering, Values

LARGE = 1 << 22
"""Elements from which a matrix is followed by rows."""

_NARROW = 16
"""Elements that such a row has at least: the number of its companions takes 4 bytes."""

_SHARE = 4
"""A matrix of which one row in so many was read gets companions for all."""


class Rows:
    """The companions of some rows.

    count: of how many. move: what moves rows that enter; None where they are no data.
    """

    __slots__ = ("_exact", "_index", "_moved", "_slots", "count", "move", "shape")

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        move: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self.shape, self.move, self.count = shape, move, 0
        self._slots = torch.full((shape[0],), -1, dtype=torch.int32, device=device)
        self._index = torch.empty(0, dtype=torch.int64, device=device)
        self._exact = torch.empty(0, shape[1], dtype=torch.float64, device=device)
        self._moved = torch.empty(0, shape[1], dtype=torch.float32, device=device)

    @property
    def numel(self) -> int:
        """Elements of the matrix."""
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that are in use."""
        return sum(t.nbytes for t in (self._slots, self._index, self._exact, self._moved))

    @property
    def many(self) -> bool:
        """True if companions of all rows are due."""
        return self.count * _SHARE > self.shape[0]

    @property
    def index(self) -> torch.Tensor:
        """The rows that have companions."""
        return self._index[: self.count]

    @property
    def exact(self) -> torch.Tensor:
        """Their exact companions, in this order."""
        return self._exact[: self.count]

    @property
    def moved(self) -> torch.Tensor:
        """Their moved companions, in this order."""
        return self._moved[: self.count]

    def read(self, values: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the companions of different rows. values: the matrix as the run has it, for rows that enter."""
        entering = index[self._slots[index] < 0]
        if entering.numel():
            real = values[entering].to(torch.float32 if values.dtype.itemsize < 8 else torch.float64)
            moved = real.to(torch.float32)
            self._enter(entering, real, moved if self.move is None else self.move(moved.view(-1)).view(moved.shape))
        slots = self._slots[index].long()
        return self._exact[slots], self._moved[slots]

    def values(self, real: torch.Tensor) -> Values:
        """Values of all rows: the others enter with their present ones."""
        values = Entering(self.numel, self.move).values(real)
        for side, known in ((values.exact, self.exact), (values.moved, self.moved)):
            side.view(self.shape)[self.index] = known
        return values

    def write(self, index: torch.Tensor, exact: torch.Tensor, moved: torch.Tensor) -> None:
        """Replace the companions of different rows."""
        slots = self._slots[index].long()
        known = slots >= 0
        if bool(known.all()):
            self._exact[slots], self._moved[slots] = exact, moved
        else:
            self._exact[slots[known]], self._moved[slots[known]] = exact[known], moved[known]
            self._enter(index[~known], exact[~known], moved[~known])

    def _enter(self, index: torch.Tensor, exact: torch.Tensor, moved: torch.Tensor) -> None:
        first, self.count = self.count, self.count + len(index)
        if self.count > len(self._index):
            size = max(self.count, 2 * len(self._index)) if first else self.count
            for name in ("_index", "_exact", "_moved"):
                old = getattr(self, name)
                setattr(self, name, torch.cat([old[:first], old.new_empty((size - first, *old.shape[1:]))]))
        self._slots[index] = torch.arange(first, self.count, dtype=torch.int32, device=index.device)
        self._index[first : self.count] = index
        self._exact[first : self.count], self._moved[first : self.count] = exact, moved


def is_large_size(numel: int) -> bool:
    """Return whether a matrix of so many elements is followed by rows."""
    return numel >= LARGE


def is_large(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a matrix that is followed by rows, and all that is in its memory."""
    return (
        tensor.numel() >= LARGE
        and tensor.layout is torch.strided
        and tensor.dim() == 2
        and tensor.shape[1] >= _NARROW
        and not tensor.is_complex()
        and tensor.is_contiguous()
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )
