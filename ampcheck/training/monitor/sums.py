"""The record of a monitored training loop, summed up on the device of the tensors; `read` alone waits for it."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from ampcheck.core.formats import FORMATS
from ampcheck.core.run import Coverage
from ampcheck.health import PendingHealth, TensorHealth
from ampcheck.health.plan import AMAX, AMIN, FINITE, Plan
from ampcheck.records.protocol import ProtocolStats
from ampcheck.records.scales import ScalerStats, ScalerStep
from ampcheck.records.stagnation import TensorUpdates
from ampcheck.torchtools.storage import device_of

_BINS = AMIN + 2
"""Where the histogram of a packed vector begins."""

_NOTES = 8
"""Columns besides the packed statistics: elements, those that are not stored, and the counts of `GradientSum`."""

_CHUNK = 1024

_WAITING = 4 * 2**20
"""Bytes of statistics that wait to be added up: many small ops on each of them would cost more than they do."""

_NORMAL, _SMALLEST = (
    int(math.log2(getattr(FORMATS["float16"], end))) for end in ("smallest_normal", "smallest_subnormal")
)

_SHIFTED = 3
"""Binades by which clipping and averaging may have made a gradient smaller since it was float16."""

_ABRUPT = 0.05
"""A spread of values thins out towards zero, to single ones in its last binade. Where the last binade has this share of
them, and more than a few, the rest of the spread was cut off."""

_FEW = 8


@dataclass(frozen=True, slots=True)
class GradientSum:
    """The gradients of one parameter in all measured steps.

    health: of all of them together, unscaled, with the histogram. calls: how many gradients; bad: how many of them with
    an infinity or NaN, the first in the step `first`; vanished: how many of zeros only. subnormal: nonzero elements
    below the normal range of float16 at the loss scale of their step. cut: how many gradients end abruptly at the
    smallest number of float16 at the loss scale: smaller elements were flushed.
    """

    health: TensorHealth
    calls: int
    bad: int
    first: int
    vanished: int
    subnormal: int
    cut: int

    def __add__(self, other: GradientSum) -> GradientSum:
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.__slots__}
        firsts = [gradients.first for gradients in (self, other) if gradients.bad]
        return GradientSum(**sums | {"first": min(firsts, default=0)})


@dataclass(frozen=True, slots=True)
class ParameterStats:
    """One parameter that an optimizer steps, summed over the measured steps.

    gradient, update: None where none was measured. Of an update only elements of fewer than 32 bits with a nonzero
    gradient count. still: the share of these that in the end are what they were at the first measured step.
    compensated: whether the optimizer keeps what rounding drops. vector: it has one dimension, as biases and norm
    weights have.
    """

    name: str
    optimizer: str
    dtype: str
    numel: int
    gradient: GradientSum | None = None
    update: TensorUpdates | None = None
    still: float | None = None
    compensated: bool = False
    vector: bool = False


@dataclass(frozen=True, slots=True)
class OptimizerStats:
    """One optimizer. steps: how many it made; measured: how many of them were measured; rates: the learning rate then.

    attempts: of each call of `scaler.step`, how often the scaler had been updated; skipped: the numbers of those
    without an optimizer step, from 0; nonfinite: the parameters whose gradients were not finite in the first of these.
    guarded: whether the optimizer skips by itself (`fused=True`), so that a gradient may be infinite in a step.
    nearest: whether it is known to round updates to the nearest number.
    """

    name: str
    steps: int
    measured: int
    rates: tuple[float, ...] = ()
    attempts: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()
    nonfinite: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    guarded: bool = False
    nearest: bool = False


@dataclass(frozen=True, slots=True)
class MonitorStats:
    """The record of training.

    enabled: whether the scaler is, None without one. scales: the loss scale before the first step, then the one after
    each update. losses: those that the loop passed to `step`. unseen: what could not be measured, and how often. calls:
    of the first steps, None for a scaler whose calls cannot be recorded.
    """

    subject: str
    every: int
    optimizers: tuple[OptimizerStats, ...]
    parameters: tuple[ParameterStats, ...]
    enabled: bool | None = None
    scales: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    unseen: Mapping[str, int] = field(default_factory=dict)
    calls: ProtocolStats | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps that were made, of all optimizers together."""
        return sum(optimizer.steps for optimizer in self.optimizers)

    @property
    def measured(self) -> int:
        """Number of measured steps."""
        return sum(optimizer.measured for optimizer in self.optimizers)

    @property
    def attempts(self) -> int:
        """Calls of `scaler.step`."""
        return sum(len(optimizer.attempts) for optimizer in self.optimizers)

    @property
    def skipped(self) -> int:
        """Number of calls of `scaler.step` that made no optimizer step."""
        return sum(len(optimizer.skipped) for optimizer in self.optimizers)

    @property
    def gradients(self) -> list[tuple[ParameterStats, GradientSum]]:
        """The parameters with a measured gradient, and it."""
        return [(param, gradient) for param in self.parameters if (gradient := param.gradient) is not None]

    @property
    def counted(self) -> str:
        """Basis of the findings, in words."""
        return f"counted in {self.measured:,} measured steps, without float64 beside them"

    @property
    def scaler(self) -> ScalerStats | None:
        """The steps of the scaler; None without one."""
        if self.enabled is None:
            return None
        taken, skipped = Counter[int](), Counter[int]()
        names: dict[int, dict[str, None]] = {}
        for optimizer in self.optimizers:
            left_out = set(optimizer.skipped)
            for number, update in enumerate(optimizer.attempts):
                (skipped if number in left_out else taken)[update] += 1
                names.setdefault(update, {}).update(dict.fromkeys(optimizer.nonfinite.get(number, ())))
        steps = (
            ScalerStep(update, scale, taken[update], skipped[update], new_scale, tuple(names.get(update, ())))
            for update, (scale, new_scale) in enumerate(zip_longest(self.scales, self.scales[1:]))
            if new_scale is not None or update in names
        )
        return ScalerStats(self.enabled, tuple(steps))

    @property
    def coverage(self) -> Coverage:
        """Counts of what was measured, and of what was not."""
        unseen = Counter(self.unseen)
        if without := len(self.parameters) - len(self.gradients):
            unseen["parameters of which no gradient was measured"] += without
        seen = {
            "optimizer steps": self.steps,
            "measured steps": self.measured,
            "gradients": sum(gradient.calls for _, gradient in self.gradients),
            "updates": sum(param.update.steps for param in self.parameters if param.update),
        }
        if self.enabled:
            seen["loss scales"] = len(self.scales)
        if self.calls is not None:
            seen["events"] = len(self.calls.events)
        return Coverage(seen, unseen)


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
        if not isinstance(value, torch.Tensor) or device_of(value).type == "cpu":
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


class Rows:
    """A float64 matrix on a device, with a row for each key from 0 on; `empty` is a row of nothing."""

    def __init__(self, empty: torch.Tensor) -> None:
        self._empty, self.values = empty, empty[None][:0]
        self._indices: dict[tuple[int, ...], torch.Tensor | slice] = {}

    def index(self, keys: tuple[int, ...]) -> torch.Tensor | slice:
        """The rows of these keys, as an index that is made once; a slice of neighbours copies nothing."""
        if keys not in self._indices:
            span = range(keys[0], keys[0] + len(keys))
            neighbours = keys == tuple(span)
            self._indices[keys] = (
                slice(span.start, span.stop) if neighbours else torch.tensor(keys, device=self._empty.device)
            )
            new = self._empty.expand(max(max(keys) + 1 - len(self.values), 0), -1)
            self.values = torch.cat((self.values, new))
        return self._indices[keys]

    def read(self) -> Iterator[tuple[int, list[float]]]:
        """Each row with its key. Waits for the device."""
        return enumerate(self.values.tolist())


class GradientSums:
    """Sums of the packed statistics of the gradients of parameters that share a device, a dtype and a plan."""

    def __init__(self, plan: Plan, dtype: str, device: torch.device) -> None:
        self._plan, self._dtype, self._device = plan, dtype, device
        empty = torch.zeros(plan.width + _NOTES, dtype=torch.float64, device=device)
        empty[AMIN] = torch.inf
        self._rows = Rows(empty)
        self._exponents = torch.tensor(plan.exponents, dtype=torch.float64, device=device)
        self._sizes: dict[tuple[tuple[int, int], ...], torch.Tensor] = {}
        self._alike: tuple[Any, Any, Any] = (), (), None
        self._waiting: list[tuple[int, torch.Tensor]] = []  # steps with the same parameters, sizes and loss scale

    def add(
        self, keys: Sequence[int], pending: Sequence[PendingHealth], step: int, scale: torch.Tensor | float = 1.0
    ) -> None:
        """Gradients of one step. keys: of their parameters; scale: the loss scale that they were divided by."""
        sizes = tuple((health.numel, health.unstored) for health in pending)
        known = float(scale) if not isinstance(scale, torch.Tensor) or device_of(scale).type == "cpu" else None
        alike = tuple(keys), sizes, known
        if alike != self._alike:
            self._add_up()
        packed = _matrix(pending)
        self._alike = alike
        self._waiting.append((step, packed))
        if known is None or len(self._waiting) * packed.nbytes >= _WAITING:
            self._add_up(None if known is not None else scale)

    def _add_up(self, unknown_scale: torch.Tensor | float | None = None) -> None:
        """Add the steps that wait. unknown_scale: the loss scale, where only its device knows it."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        keys, sizes, scale = self._alike
        index = self._rows.index(keys)
        if sizes not in self._sizes:
            if len(self._sizes) > _CHUNK:
                self._sizes.clear()  # sparse gradients store another number of elements each time
            self._sizes[sizes] = torch.tensor(sizes, dtype=torch.float64, device=self._device)
        size, total = self._sizes[sizes], self._rows.values[index]
        packed = torch.stack([matrix for _, matrix in waiting])  # [steps, parameters, width]
        bad = size[:, 0] - size[:, 1] > packed[..., FINITE]
        steps = torch.stack([size.new_full((), step) for step, _ in waiting])
        first = steps[bad.int().argmax(0)] * (bad.any(0) & (total[:, self._plan.width + 3] == 0))
        vanished = (packed[..., AMAX] == 0) & ~bad
        counts = packed[..., _BINS:]
        below = counts @ self._mask(scale if unknown_scale is None else unknown_scale)
        least = below[..., 2:].gather(-1, (below[..., 2:] > 0).int().argmax(-1, keepdim=True)).squeeze(-1)
        cut = (below[..., 1] == 0) & (least >= _FEW) & (least >= _ABRUPT * counts.sum(-1))
        notes = (torch.ones_like(least), bad, torch.zeros_like(least), vanished, below[..., 0], cut)
        summed = total + torch.cat((packed.sum(0), size * len(waiting), torch.stack(notes, -1).sum(0)), 1)
        summed[:, self._plan.width + 4] += first
        summed[:, AMAX] = torch.maximum(total[:, AMAX], packed[..., AMAX].amax(0))
        summed[:, AMIN] = torch.minimum(total[:, AMIN], packed[..., AMIN].amin(0))
        self._rows.values[index] = summed

    def _mask(self, scale: torch.Tensor | float) -> torch.Tensor:
        """Which bins of the histogram are subnormal, flushed, and each of the last binades of float16 at a loss scale,
        [bins, counts]."""
        exponent: torch.Tensor | float
        if isinstance(scale, torch.Tensor):
            exponent = scale.detach().to(self._device, torch.float64, non_blocking=True).log2()
        else:
            exponent = math.log2(scale) if 0 < scale < math.inf else math.inf
        scaled = (self._exponents + exponent).floor()
        last = [scaled == _SMALLEST - shift for shift in range(_SHIFTED, -1, -1)]
        return torch.stack((scaled < _NORMAL, scaled < _SMALLEST - _SHIFTED, *last), 1).double()

    def read(self) -> dict[int, GradientSum]:
        """The sums by key. Waits for the device."""
        self._add_up()
        sums, width = {}, self._plan.width
        for key, row in self._rows.read():
            numel, unstored, calls, *counts = map(int, row[width:])
            if calls:
                sums[key] = GradientSum(self._plan.unpack(row[:width], self._dtype, numel, unstored), calls, *counts)
        return sums


def _matrix(pending: Sequence[PendingHealth]) -> torch.Tensor:
    tensors = [health.packed for health in pending if isinstance(health.packed, torch.Tensor)]
    if len(tensors) == len(pending):
        return torch.stack(tensors)
    rows = [np.asarray(health.packed, dtype=np.float64) for health in pending]
    return torch.from_numpy(np.concatenate(rows).reshape(len(rows), -1))
