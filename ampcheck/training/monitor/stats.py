"""The record of a monitored training loop, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ampcheck.core.run import Coverage
from ampcheck.health import TensorHealth
from ampcheck.training.scale.stats import skipped_last


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
        return GradientSum(
            self.health + other.health,
            self.calls + other.calls,
            self.bad + other.bad,
            min((gradients.first for gradients in (self, other) if gradients.bad), default=other.first),
            self.vanished + other.vanished,
            self.subnormal + other.subnormal,
            self.cut + other.cut,
        )


@dataclass(frozen=True, slots=True)
class UpdateSum:
    """The updates of one parameter in all measured steps.

    calls: how many updates. update, weight: the root of the sum of squares of the changes, and of the weights after
    them. poisoned: after how many of them the weights were not finite. due: elements with a nonzero gradient;
    unchanged: how many of them kept their value; both only for parameters of fewer bits than float32. expected: in a
    sample of elements whose update rounding to nearest drops, how many stochastic rounding would have moved; moved: how
    many moved. Both are 0 where the optimizer is known to round to nearest.
    """

    calls: int
    update: float
    weight: float
    poisoned: int
    due: int
    unchanged: int
    expected: float = 0.0
    moved: int = 0

    @property
    def unchanged_share(self) -> float | None:
        """The share of updates that changed nothing; None for parameters of 32 bits or more."""
        return self.unchanged / self.due if self.due else None


@dataclass(frozen=True, slots=True)
class ParameterStats:
    """One parameter that an optimizer steps, summed over the measured steps.

    gradient, update: None where none was measured. still: for parameters of fewer bits than float32, the share of the
    updated elements that in the end are what they were at the first measured step. compensated: whether the optimizer
    keeps what rounding drops.
    """

    name: str
    optimizer: str
    dtype: str
    numel: int
    gradient: GradientSum | None = None
    update: UpdateSum | None = None
    still: float | None = None
    compensated: bool = False


@dataclass(frozen=True, slots=True)
class OptimizerStats:
    """One optimizer. steps: how many it made; measured: how many of them were measured; rates: the learning rate then.

    attempts: calls of `scaler.step`; skipped: the numbers of those without an optimizer step, from 0. guarded: whether
    the optimizer skips by itself (`fused=True`), so that a gradient may be infinite in a step. nearest: whether it is
    known to round updates to the nearest number.
    """

    name: str
    steps: int
    measured: int
    rates: tuple[float, ...] = ()
    attempts: int = 0
    skipped: tuple[int, ...] = ()
    guarded: bool = False
    nearest: bool = False

    @property
    def skipped_last(self) -> int:
        """How many attempts at the end were skipped one after the other."""
        skipped = set(self.skipped)
        return skipped_last((number, 1.0, number in skipped) for number in range(self.attempts))


@dataclass(frozen=True, slots=True)
class ScalerHistory:
    """The loss scale over time: `scales[0]` before the first update, then the one after each.

    culprits: parameters with a gradient that was not finite, by the number of skipped steps in which it was not; only
    the first skipped steps are counted.
    """

    enabled: bool
    scales: tuple[float, ...] = ()
    growth_interval: int = 2000
    culprits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MonitorStats:
    """The record of training. losses: those that the loop passed to `step`. copies: the most bytes that copies of
    weights took at once. unseen: what could not be measured, and how often."""

    subject: str
    every: int
    optimizers: tuple[OptimizerStats, ...]
    parameters: tuple[ParameterStats, ...]
    scaler: ScalerHistory | None = None
    losses: tuple[float, ...] = ()
    copies: int = 0
    unseen: Mapping[str, int] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Optimizer steps that were made, of all optimizers together."""
        return sum(optimizer.steps for optimizer in self.optimizers)

    @property
    def measured(self) -> int:
        """How many of them were measured."""
        return sum(optimizer.measured for optimizer in self.optimizers)

    @property
    def attempts(self) -> int:
        """Calls of `scaler.step`."""
        return sum(optimizer.attempts for optimizer in self.optimizers)

    @property
    def skipped(self) -> int:
        """How many of them made no optimizer step."""
        return sum(len(optimizer.skipped) for optimizer in self.optimizers)

    @property
    def gradients(self) -> list[tuple[ParameterStats, GradientSum]]:
        """The parameters with a measured gradient, and it."""
        return [(param, gradient) for param in self.parameters if (gradient := param.gradient) is not None]

    @property
    def is_scaled(self) -> bool:
        """Whether a scaler is in use."""
        return self.scaler is not None and self.scaler.enabled

    @property
    def coverage(self) -> Coverage:
        """What was measured, and what was not."""
        unseen = Counter(self.unseen)
        if without := len(self.parameters) - len(self.gradients):
            unseen["parameters of which no gradient was measured"] += without
        seen = {
            "optimizer steps": self.steps,
            "measured steps": self.measured,
            "gradients": sum(gradient.calls for _, gradient in self.gradients),
            "updates": sum(param.update.calls for param in self.parameters if param.update),
        }
        if self.scaler is not None and self.scaler.enabled:
            seen["loss scales"] = len(self.scaler.scales)
        return Coverage(seen, unseen)
