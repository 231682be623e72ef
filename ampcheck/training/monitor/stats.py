"""What a watch has seen of a user's own loop, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ampcheck.core.run import Coverage
from ampcheck.training.monitor.folded import GradientSum, UpdateSum


@dataclass(frozen=True, slots=True)
class WatchedParameter:
    """One parameter that an optimizer steps, summed over the measured steps.

    gradient, update: None where none was measured. still: for parameters of fewer bits than float32, the share of the
    elements whose updates were looked at that were in the end what they were at the first measured step. exempt: why
    its value may stay for a while although it is updated; empty otherwise.
    """

    name: str
    optimizer: str
    dtype: str
    numel: int
    gradient: GradientSum | None = None
    update: UpdateSum | None = None
    still: float | None = None
    exempt: str = ""


@dataclass(frozen=True, slots=True)
class WatchedOptimizer:
    """One optimizer. steps: how many it made; measured: how many of them were looked at; rates: the learning rate then.

    attempts: how many steps a scaler was asked for; skipped: the numbers of those that it did not make, from 0.
    guarded: whether the optimizer skips by itself (`fused=True`), so that a
    gradient may be infinite in a step. nearest: whether it is known to round updates to the nearest number.
    """

    name: str
    steps: int
    measured: int
    rates: tuple[float, ...] = ()
    attempts: int = 0
    skipped: tuple[int, ...] = ()
    guarded: bool = False
    nearest: bool = False


@dataclass(frozen=True, slots=True)
class WatchedScaler:
    """The loss scale over time: `scales[0]` before the first update, then the one after each.

    culprits: parameters with a gradient that was not finite, by the number of skipped steps in which it was seen so;
    only the first skipped steps are looked at. growth_interval, growth, backoff: how it is set.
    """

    enabled: bool
    scales: tuple[float, ...] = ()
    growth_interval: int = 2000
    growth: float = 2.0
    backoff: float = 0.5
    culprits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WatchStats:
    """What was seen of training. losses: what the loop told, one for each of its steps. copies: the most bytes that
    copies of weights took at once. unseen: what could not be looked at, and how often."""

    subject: str
    every: int
    optimizers: tuple[WatchedOptimizer, ...]
    parameters: tuple[WatchedParameter, ...]
    scaler: WatchedScaler | None = None
    losses: tuple[float, ...] = ()
    copies: int = 0
    unseen: Mapping[str, int] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Optimizer steps that were made, of all optimizers together."""
        return sum(one.steps for one in self.optimizers)

    @property
    def measured(self) -> int:
        """How many of them were looked at."""
        return sum(one.measured for one in self.optimizers)

    @property
    def attempts(self) -> int:
        """Steps that a scaler was asked for."""
        return sum(one.attempts for one in self.optimizers)

    @property
    def skipped(self) -> int:
        """How many of them it did not make."""
        return sum(len(one.skipped) for one in self.optimizers)

    @property
    def coverage(self) -> Coverage:
        """How much was looked at."""
        unseen = Counter(self.unseen)
        if without := sum(one.gradient is None for one in self.parameters):
            unseen["parameters of which no gradient was measured"] += without
        seen = {
            "optimizer steps": self.steps,
            "measured steps": self.measured,
            "gradients": sum(one.gradient.calls for one in self.parameters if one.gradient),
            "updates": sum(one.update.calls for one in self.parameters if one.update),
        }
        if self.scaler is not None and self.scaler.enabled:
            seen["loss scales"] = len(self.scaler.scales)
        return Coverage(seen, unseen)
