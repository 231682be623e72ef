"""Numbers of many steps, added up on the device where they are; nothing is read from it before someone asks."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ampcheck.core.formats import FORMATS
from ampcheck.health import PendingHealth, TensorHealth
from ampcheck.health.plan import Plan

_FINITE, _AMAX = 2, 4
"""Where a packed vector without casts keeps the count of finite elements and the extremes; see `health.plan`."""

_BINS = _AMAX + 3

_NOTES = 6
"""Columns beside the packed statistics: gradients that are not finite, the first and last step of such, gradients of
zeros only, elements that are subnormal in float16, and gradients that it cut off."""

_UPDATE = 7
"""Columns of what is summed of updates."""

_CHUNK = 1024

_NORMAL, _SMALLEST = (
    int(math.log2(getattr(FORMATS["float16"], end))) for end in ("smallest_normal", "smallest_subnormal")
)

_SHIFTED = 3
"""Binades by which clipping and averaging may have made a gradient smaller since it was float16."""

_ABRUPT = 0.05
"""A spread of values thins out towards zero, to single ones in its last binade. Where the last binade holds this share
of them, and more than a few, the rest of the spread was cut off."""

_FEW = 8


class Trace:
    """One number for each step. Of a tensor on a device a copy waits there; one on the CPU is read at once."""

    def __init__(self) -> None:
        self._known = array("d")
        self._chunks: list[torch.Tensor] = []
        self._waiting: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._known) + sum(len(chunk) for chunk in self._chunks) + len(self._waiting)

    def append(self, value: torch.Tensor | float) -> None:
        """Keep a number, or a tensor of one element as it is now. A trace holds either sort, not both."""
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            self._known.append(float(value))
            return
        self._waiting.append(value.detach().reshape(()).to(torch.float32, copy=True))
        if len(self._waiting) == _CHUNK:
            self._chunks.append(torch.stack(self._waiting))
            self._waiting = []

    def read(self) -> list[float]:
        """All of them, in their order."""
        chunks = [*self._chunks, *([torch.stack(self._waiting)] if self._waiting else [])]
        return [*self._known, *(value for chunk in chunks for value in chunk.tolist())]


@dataclass(frozen=True, slots=True)
class GradientSum:
    """The gradients of one parameter in all measured steps.

    health: of all of them together, unscaled, with the histogram. calls: how many gradients; bad: how many of them with
    an infinity or NaN, the first and last in the steps `first` and `last`; vanished: how many of zeros only.
    subnormal: nonzero elements that lie below the normal range of float16 at the loss scale of their step. cut: how
    many gradients end abruptly at the smallest number of float16 at the loss scale: what is smaller was flushed.
    """

    health: TensorHealth
    calls: int
    bad: int
    first: int
    last: int
    vanished: int
    subnormal: int
    cut: int

    def __add__(self, other: GradientSum) -> GradientSum:
        if not (self.bad and other.bad):
            first, last = (self.first, self.last) if self.bad else (other.first, other.last)
        else:
            first, last = min(self.first, other.first), max(self.last, other.last)
        return GradientSum(
            self.health + other.health,
            self.calls + other.calls,
            self.bad + other.bad,
            first,
            last,
            self.vanished + other.vanished,
            self.subnormal + other.subnormal,
            self.cut + other.cut,
        )


class _Rows:
    """A row of a matrix for each key that ever came; an index on the device is made once for the same keys."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, int] = {}
        self._places: dict[tuple[int, ...], torch.Tensor | slice] = {}

    def _place(self, keys: tuple[int, ...]) -> torch.Tensor | slice:
        if new := [key for key in keys if key not in self._rows]:
            for key in new:
                self._rows[key] = len(self._rows)
            self._grow(len(new))
            self._places.clear()
        if keys not in self._places:
            rows = [self._rows[key] for key in keys]
            whole = rows == list(range(len(self._rows)))
            self._places[keys] = slice(None) if whole else torch.tensor(rows, device=self._device)
        return self._places[keys]

    def _grow(self, rows: int) -> None:
        raise NotImplementedError

    def _zeros(self, rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(rows, columns, dtype=torch.float64, device=self._device)


class GradientFold(_Rows):
    """Adds up the packed statistics of the gradients of parameters that share a device, a dtype and a plan."""

    def __init__(self, plan: Plan, dtype: str, device: torch.device) -> None:
        super().__init__(device)
        self._plan, self._dtype = plan, dtype
        self._numel: list[int] = []
        self._unstored: list[int] = []
        self._calls: list[int] = []
        self._packed, self._notes = self._zeros(0, plan.width), self._zeros(0, _NOTES)
        self._exponents = torch.tensor(plan.exponents, dtype=torch.float64, device=device)
        self._stored: dict[tuple[int, ...], torch.Tensor] = {}
        self._known: dict[float | None, torch.Tensor] = {}

    def add(self, keys: Sequence[int], pending: Sequence[PendingHealth], step: int, scale: Any = 1.0) -> None:
        """Gradients of one step. keys: whose they are; scale: the loss scale that was taken out of them, 1 without."""
        place = self._place(tuple(keys))
        stored = tuple(one.numel - one.unstored for one in pending)
        for row, one in zip((self._rows[key] for key in keys), pending, strict=True):
            self._numel[row] += one.numel
            self._unstored[row] += one.unstored
            self._calls[row] += 1
        if stored not in self._stored:
            if len(self._stored) > _CHUNK:
                self._stored.clear()  # sparse gradients store another number of elements each time
            self._stored[stored] = torch.tensor(stored, dtype=torch.float64, device=self._device)
        packed = self._matrix(pending)
        bad = self._stored[stored] > packed[:, _FINITE]
        empty = (packed[:, _AMAX] == 0) & ~bad
        notes = self._notes[place]
        before = notes[:, 0] == 0
        notes[:, 1] = torch.where(bad & before, float(step), notes[:, 1])
        notes[:, 2] = torch.where(bad, float(step), notes[:, 2])
        notes[:, 0] += bad
        notes[:, 3] += empty
        self._mark(notes, packed[:, _BINS:], scale)
        total = self._packed[place]
        summed = total + packed
        summed[:, _AMAX] = torch.maximum(total[:, _AMAX], packed[:, _AMAX])
        summed[:, _AMAX + 1] = torch.minimum(total[:, _AMAX + 1], packed[:, _AMAX + 1])
        self._packed[place], self._notes[place] = summed, notes

    def _mark(self, notes: torch.Tensor, counts: torch.Tensor, scale: Any) -> None:
        """Note in the last columns what float16 has left of gradients with these histograms."""
        below = counts @ self._masks(scale)
        least = below[:, 2:].gather(1, (below[:, 2:] > 0).int().argmax(1, keepdim=True)).squeeze(1)
        abrupt = (below[:, 1] == 0) & (least >= _FEW) & (least >= _ABRUPT * counts.sum(1))
        notes[:, 4] += below[:, 0]
        notes[:, 5] += abrupt

    def _masks(self, scale: Any) -> torch.Tensor:
        """Which bins count for which note, [bins, notes], at a loss scale; kept where the scale is known here."""
        known = scale if isinstance(scale, float) else float(scale) if scale.device.type == "cpu" else None
        if known in self._known:
            return self._known[known]
        if known is not None:
            exponent = math.log2(known) if 0 < known < math.inf else math.inf
        else:
            exponent = scale.detach().to(self._device, torch.float64, non_blocking=True).log2()
        held = (self._exponents + exponent).floor()
        last = [held == _SMALLEST - shift for shift in range(_SHIFTED, -1, -1)]
        masks = torch.stack((held < _NORMAL, held < _SMALLEST - _SHIFTED, *last), 1).double()
        if known is not None:
            self._known[known] = masks
        return masks

    def read(self) -> dict[int, GradientSum]:
        """What was added up, by key. Waits for the device."""
        packed, notes = self._packed.tolist(), self._notes.tolist()
        read = {}
        for key, row in self._rows.items():
            health = self._plan.unpack(packed[row], self._dtype, self._numel[row], self._unstored[row])
            bad, first, last, vanished, subnormal, cut = map(int, notes[row])
            read[key] = GradientSum(health, self._calls[row], bad, first, last, vanished, subnormal, cut)
        return read

    def _matrix(self, pending: Sequence[PendingHealth]) -> torch.Tensor:
        tensors = [one.packed for one in pending if isinstance(one.packed, torch.Tensor)]
        if len(tensors) == len(pending):
            return torch.stack(tensors)
        rows = [one.packed.tolist() if isinstance(one.packed, torch.Tensor) else one.packed for one in pending]
        return torch.from_numpy(np.array(rows, dtype=np.float64))

    def _grow(self, rows: int) -> None:
        for counts in (self._numel, self._unstored, self._calls):
            counts += [0] * rows
        packed = self._zeros(rows, self._plan.width)
        packed[:, _AMAX + 1] = torch.inf
        self._packed = torch.cat((self._packed, packed))
        self._notes = torch.cat((self._notes, self._zeros(rows, _NOTES)))


@dataclass(frozen=True, slots=True)
class UpdateSum:
    """The updates of one parameter in all measured steps.

    calls: how many updates. update, weight: the root of the sum of squares of the changes, and of the weights after
    them. poisoned: after how many of them the weights were not finite. due: elements with a nonzero gradient;
    unchanged: how many of them kept their value; both only for parameters of fewer bits than float32. expected: of a
    sample of those that rounding to nearest leaves where they are, how many stochastic rounding would have moved;
    moved: how many moved. Both are 0 where the optimizer is known to round to nearest.
    """

    calls: int
    update: float
    weight: float
    poisoned: int
    due: int
    unchanged: int
    expected: float = 0.0
    moved: int = 0


class UpdateFold(_Rows):
    """Adds up what updates did to the parameters of one device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._calls: list[int] = []
        self._sums = self._zeros(0, _UPDATE)

    def add(
        self,
        keys: Sequence[int],
        norms: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
        counts: dict[int, torch.Tensor],
    ) -> None:
        """Updates of one step. norms: of the changes, of the weights, all 0-d; counts: `(due, unchanged, expected,
        moved)` by key, each float64 [4]."""
        place = self._place(tuple(keys))
        for key in keys:
            self._calls[self._rows[key]] += 1
        both = torch.stack([torch.stack(tuple(one)) for one in norms], 1).double()
        poisoned = ~both[:, 1:].isfinite()
        row = torch.cat((both.square().nan_to_num(0.0, 0.0, 0.0), poisoned), 1)
        if counts:
            none = torch.zeros(4, dtype=torch.float64, device=self._device)
            row = torch.cat((row, torch.stack([counts.get(key, none) for key in keys])), 1)
        self._sums[place, : row.shape[1]] += row

    def read(self) -> dict[int, UpdateSum]:
        """What was added up, by key. Waits for the device."""
        sums = self._sums.tolist()
        read = {}
        for key, row in self._rows.items():
            update, weight, poisoned, due, unchanged, expected, moved = sums[row]
            counts = int(poisoned), int(due), int(unchanged), expected, int(moved)
            read[key] = UpdateSum(self._calls[row], update**0.5, weight**0.5, *counts)
        return read

    def _grow(self, rows: int) -> None:
        self._calls += [0] * rows
        self._sums = torch.cat((self._sums, self._zeros(rows, _UPDATE)))
