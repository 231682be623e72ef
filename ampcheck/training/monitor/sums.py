"""Sums over many steps, on the device of the tensors; nothing is read from it before `read`."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ampcheck.core.formats import FORMATS
from ampcheck.health import PendingHealth
from ampcheck.health.plan import Plan
from ampcheck.training.monitor.stats import GradientSum, UpdateSum

_FINITE, _AMAX = 2, 4
"""Where a packed vector without casts has the count of finite elements and the extremes; see `health.plan`."""

_BINS = _AMAX + 3

_NOTES = 5
"""Columns besides the packed statistics: gradients that are not finite, the first step of such, gradients of zeros
only, elements that are subnormal in float16, and gradients that it cut off."""

_UPDATE = 7
"""Columns of the sums of updates."""

_CHUNK = 1024

_NORMAL, _SMALLEST = (
    int(math.log2(getattr(FORMATS["float16"], end))) for end in ("smallest_normal", "smallest_subnormal")
)

_SHIFTED = 3
"""Binades by which clipping and averaging may have made a gradient smaller since it was float16."""

_ABRUPT = 0.05
"""A spread of values thins out towards zero, to single ones in its last binade. Where the last binade has this share of
them, and more than a few, the rest of the spread was cut off."""

_FEW = 8


class Series:
    """One number for each step. Of a tensor on a device a copy waits there; one on the CPU is read at once."""

    def __init__(self) -> None:
        self._known = array("d")
        self._chunks: list[torch.Tensor] = []
        self._waiting: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._known) + sum(map(len, self._chunks)) + len(self._waiting)

    def append(self, value: torch.Tensor | float) -> None:
        """Append a number, or a copy of a tensor of one element. All values of a series are of one kind."""
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            self._known.append(float(value))
            return
        self._waiting.append(value.detach().reshape(()).to(torch.float32, copy=True))
        if len(self._waiting) == _CHUNK:
            self._chunks.append(torch.stack(self._waiting))
            self._waiting = []

    def read(self) -> tuple[float, ...]:
        """All of them, in their order."""
        chunks = [*self._chunks, *([torch.stack(self._waiting)] if self._waiting else [])]
        return (*self._known, *(value for chunk in chunks for value in chunk.tolist()))


class _Rows:
    """Numbers a row of a matrix for each key; the index on the device is cached for equal sequences of keys."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, int] = {}
        self._indices: dict[tuple[int, ...], torch.Tensor | slice] = {}

    def _index(self, keys: tuple[int, ...]) -> torch.Tensor | slice:
        if new := [key for key in keys if key not in self._rows]:
            self._rows |= zip(new, range(len(self._rows), len(self._rows) + len(new)), strict=True)
            self._grow(len(new))
            self._indices.clear()
        if keys not in self._indices:
            rows = [self._rows[key] for key in keys]
            whole = rows == list(range(len(self._rows)))
            self._indices[keys] = slice(None) if whole else torch.tensor(rows, device=self._device)
        return self._indices[keys]

    def _grow(self, rows: int) -> None:
        raise NotImplementedError

    def _zeros(self, rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(rows, columns, dtype=torch.float64, device=self._device)


class GradientSums(_Rows):
    """Sums of the packed statistics of the gradients of parameters that share a device, a dtype and a plan."""

    def __init__(self, plan: Plan, dtype: str, device: torch.device) -> None:
        super().__init__(device)
        self._plan, self._dtype = plan, dtype
        self._numel: list[int] = []
        self._unstored: list[int] = []
        self._calls: list[int] = []
        self._packed, self._notes = self._zeros(0, plan.width), self._zeros(0, _NOTES)
        self._exponents = torch.tensor(plan.exponents, dtype=torch.float64, device=device)
        self._stored: dict[tuple[int, ...], torch.Tensor] = {}
        self._masks: dict[float, torch.Tensor] = {}

    def add(
        self, keys: Sequence[int], pending: Sequence[PendingHealth], step: int, scale: torch.Tensor | float = 1.0
    ) -> None:
        """Gradients of one step. keys: of their parameters; scale: the loss scale that they were divided by."""
        index = self._index(tuple(keys))
        stored = tuple(health.numel - health.unstored for health in pending)
        for key, health in zip(keys, pending, strict=True):
            row = self._rows[key]
            self._numel[row] += health.numel
            self._unstored[row] += health.unstored
            self._calls[row] += 1
        if stored not in self._stored:
            if len(self._stored) > _CHUNK:
                self._stored.clear()  # sparse gradients store another number of elements each time
            self._stored[stored] = torch.tensor(stored, dtype=torch.float64, device=self._device)
        packed = _matrix(pending)
        bad = self._stored[stored] > packed[:, _FINITE]
        notes = self._notes[index]
        notes[:, 1] = torch.where(bad & (notes[:, 0] == 0), float(step), notes[:, 1])
        notes[:, 0] += bad
        notes[:, 2] += (packed[:, _AMAX] == 0) & ~bad
        counts = packed[:, _BINS:]
        below = counts @ self._mask(scale)
        least = below[:, 2:].gather(1, (below[:, 2:] > 0).int().argmax(1, keepdim=True)).squeeze(1)
        notes[:, 3] += below[:, 0]
        notes[:, 4] += (below[:, 1] == 0) & (least >= _FEW) & (least >= _ABRUPT * counts.sum(1))
        total = self._packed[index]
        summed = total + packed
        summed[:, _AMAX] = torch.maximum(total[:, _AMAX], packed[:, _AMAX])
        summed[:, _AMAX + 1] = torch.minimum(total[:, _AMAX + 1], packed[:, _AMAX + 1])
        self._packed[index], self._notes[index] = summed, notes

    def _mask(self, scale: torch.Tensor | float) -> torch.Tensor:
        """Which bins of the histogram are subnormal, flushed, and each of the last binades of float16 at a loss scale,
        [bins, counts]; cached where the scale is known on the CPU."""
        if isinstance(scale, torch.Tensor) and scale.device.type != "cpu":
            return self._mask_from(scale.detach().to(self._device, torch.float64, non_blocking=True).log2())
        known = float(scale)
        if known not in self._masks:
            self._masks[known] = self._mask_from(math.log2(known) if 0 < known < math.inf else math.inf)
        return self._masks[known]

    def _mask_from(self, exponent: torch.Tensor | float) -> torch.Tensor:
        scaled = (self._exponents + exponent).floor()
        last = [scaled == _SMALLEST - shift for shift in range(_SHIFTED, -1, -1)]
        return torch.stack((scaled < _NORMAL, scaled < _SMALLEST - _SHIFTED, *last), 1).double()

    def read(self) -> dict[int, GradientSum]:
        """The sums by key. Waits for the device."""
        packed, notes = self._packed.tolist(), self._notes.tolist()
        return {
            key: GradientSum(
                self._plan.unpack(packed[row], self._dtype, self._numel[row], self._unstored[row]),
                self._calls[row],
                *map(int, notes[row]),
            )
            for key, row in self._rows.items()
        }

    def _grow(self, rows: int) -> None:
        for counts in (self._numel, self._unstored, self._calls):
            counts += [0] * rows
        packed = self._zeros(rows, self._plan.width)
        packed[:, _AMAX + 1] = torch.inf
        self._packed = torch.cat((self._packed, packed))
        self._notes = torch.cat((self._notes, self._zeros(rows, _NOTES)))


def _matrix(pending: Sequence[PendingHealth]) -> torch.Tensor:
    tensors = [health.packed for health in pending if isinstance(health.packed, torch.Tensor)]
    if len(tensors) == len(pending):
        return torch.stack(tensors)
    rows = [health.packed.tolist() if isinstance(health.packed, torch.Tensor) else health.packed for health in pending]
    return torch.from_numpy(np.array(rows, dtype=np.float64))


class UpdateSums(_Rows):
    """Sums of the updates of the parameters on one device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._calls: list[int] = []
        self._sums = self._zeros(0, _UPDATE)

    def add(
        self,
        keys: Sequence[int],
        changes: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        counts: Mapping[int, torch.Tensor],
    ) -> None:
        """Updates of one step. changes, weights: their norms, all 0-d; counts: `(due, unchanged, expected, moved)` by
        key, each float64 [4]."""
        index = self._index(tuple(keys))
        for key in keys:
            self._calls[self._rows[key]] += 1
        norms = torch.stack((torch.stack(tuple(changes)), torch.stack(tuple(weights))), 1).double()
        row = torch.cat((norms.square().nan_to_num(0.0, 0.0, 0.0), ~norms[:, 1:].isfinite()), 1)
        if counts:
            none = torch.zeros(4, dtype=torch.float64, device=self._device)
            row = torch.cat((row, torch.stack([counts.get(key, none) for key in keys])), 1)
        self._sums[index, : row.shape[1]] += row

    def read(self) -> dict[int, UpdateSum]:
        """The sums by key. Waits for the device."""
        sums, rows = {}, self._sums.tolist()
        for key, row in self._rows.items():
            update, weight, poisoned, due, unchanged, expected, moved = rows[row]
            counts = int(poisoned), int(due), int(unchanged), expected, int(moved)
            sums[key] = UpdateSum(self._calls[row], update**0.5, weight**0.5, *counts)
        return sums

    def _grow(self, rows: int) -> None:
        self._calls += [0] * rows
        self._sums = torch.cat((self._sums, self._zeros(rows, _UPDATE)))
