"""Record of the starts of a subject: each launch of a fresh process, and the arms they belong to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Scalar
from ampcheck.records.graphs import GraphStats
from ampcheck.records.speed import ArmTimes


@dataclass(frozen=True, slots=True)
class BreakEven:
    """A number of calls, and its interval at 95 per cent; infinity is never.

    cost: seconds, of the typical launch. saving: seconds of each call, negative where the arm is slower.
    """

    calls: float
    low: float
    high: float
    cost: float
    saving: float

    @property
    def never(self) -> bool:
        """True if even the lower end of the interval is infinite."""
        return math.isinf(self.low)

    @property
    def undecided(self) -> bool:
        """True if the interval includes both never and a number of calls."""
        return not self.never and math.isinf(self.high)

    def __str__(self) -> str:
        if self.never:
            return "never"
        if self.undecided:
            return f"undecided, {math.ceil(self.low):,} calls at the least"
        return f"{math.ceil(self.calls):,} calls ({math.ceil(self.low):,} to {math.ceil(self.high):,})"


EAGER, COLD, WARM, ARTIFACTS = "eager", "cold", "warm", "artifacts"

REGIONAL, FIXED, DYNAMIC = "cold, regional", "cold, fixed shapes", "cold, dynamic shapes"

CACHED = (WARM, ARTIFACTS)
"""Arms that must not compile a graph again."""

FX, AOT = "FX graph cache", "AOTAutograd cache"

ENOUGH = 3
"""Launches without which no number of seconds fails: one launch of a process varies too much."""

NOISE = 0.3
"""The assumed error of fewer launches, as a share: six cold starts of one small program on two busy cores were from 25
per cent below their median to 31 per cent above it."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup in a cache of compiled code.

    cache: `FX` or `AOT`. result: `hit`, `miss` or `bypass`. reason: PyTorch's own, if any. parts: of the key, name to
    value, in PyTorch's words.
    """

    cache: str
    result: str
    reason: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Launch:
    """One fresh process, up to its steady state. Seconds throughout.

    imported: `import torch`; loaded: the subject, and what it imports; artifacts_loaded: `load_cache_artifacts`; built:
    the copy of the subject and `torch.compile`, which imports the compiler. passes: the first steps, each until the
    device is done; the first compiles. compiling: the part of all this in PyTorch's compiler. times: the eager
    reference and this arm in turn, block by block; empty where only the start was measured. memory: bytes at the peak
    of a step, None with `memory_untold`. saved: artifacts and their bytes; taken: artifacts that were loaded. kernels:
    None where PyTorch does not count them. binaries: files of machine code that a C++ compiler built. off: caches that
    settings switch off. untold: why there are no lookups and no graph.
    """

    imported: float
    loaded: float
    built: float
    passes: tuple[float, ...]
    artifacts_loaded: float = 0.0
    compiling: float | None = None
    times: tuple[ArmTimes, ...] = ()
    memory: int | None = None
    memory_untold: str = ""
    kernels: int | None = None
    binaries: int = 0
    lookups: tuple[Lookup, ...] = ()
    off: tuple[str, ...] = ()
    saved: int = 0
    saved_bytes: int = 0
    taken: int = 0
    untold: str = ""
    graph: GraphStats | None = None

    @property
    def first(self) -> float:
        """Seconds from the loaded subject to the end of its first step."""
        return self.artifacts_loaded + self.built + self.passes[0]

    @property
    def steady(self) -> float:
        """Seconds of a step once warm: in the blocks, or else the last of the first steps."""
        return self.times[-1].median if self.times else self.passes[-1]

    def extra(self, steady: float) -> float:
        """Seconds that the start takes beyond as many steps in the steady state."""
        return max(self.artifacts_loaded + self.built + sum(self.passes) - len(self.passes) * steady, 0.0)

    def count(self, result: str, cache: str = "") -> int:
        """Lookups with this result."""
        return sum(lookup.result == result and cache in ("", lookup.cache) for lookup in self.lookups)


@dataclass(frozen=True, slots=True)
class StartupArm:
    """A kind of start, and its launches. config: mode and precision, of `StepConfig`."""

    name: str
    config: str
    launches: tuple[Launch, ...]

    @property
    def first(self) -> float:
        """Seconds to the end of the first step; the median of the launches."""
        return median(launch.first for launch in self.launches)

    @property
    def timed(self) -> Launch:
        """The launch that was timed in the steady state, and whose memory was measured."""
        return self.launches[0]

    @property
    def extras(self) -> tuple[float, ...]:
        """Of each launch the seconds that its start takes beyond steps in the steady state."""
        return tuple(launch.extra(self.timed.steady) for launch in self.launches)


@dataclass(frozen=True, slots=True)
class StartupStats:
    """The starts of a subject: eager, and compiled with empty caches, warm caches, artifacts, by regions, with dynamic
    shapes. left_out: arms that did not run, with the reason."""

    subject: str
    arms: tuple[StartupArm, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, Scalar] = field(default_factory=dict)

    def arm(self, name: str) -> StartupArm | None:
        """The arm of this name; None where it did not run."""
        return next((arm for arm in self.arms if arm.name == name), None)

    @property
    def eager(self) -> StartupArm:
        """The reference. Raises `UsageError` where there is none."""
        if (eager := self.arm(EAGER)) is None:
            raise UsageError(f"the start of {self.subject} has no eager arm to be compared with")
        return eager

    def times(self, arm: StartupArm) -> tuple[ArmTimes, ...]:
        """Eager and this arm in turn, cycle by cycle; empty where they were not timed.

        Starts with empty caches, with warm ones and with artifacts run the same code once warm, so that the times of
        the three are joined: a call saves as much in each.
        """
        same = (COLD, *CACHED)
        arms = [other for other in self.arms if other.name in same] if arm.name in same else [arm]
        times = [other.timed.times for other in arms]
        pairs = [(pair[0], pair[-1]) for pair in times if len(pair) > 1]
        return tuple(
            replace(parts[0], seconds=tuple(second for part in parts for second in part.seconds))
            for parts in zip(*pairs, strict=True)
        )

    def cost(self, arm: StartupArm) -> tuple[float, ...]:
        """Of each launch the seconds that its start takes beyond the eager one: the cost of compilation."""
        eager = median(self.eager.extras)
        return tuple(max(extra - eager, 0.0) for extra in arm.extras)

    def cost_range(self, arm: StartupArm) -> tuple[float, float]:
        """The cheapest and the dearest launch, in seconds; wider by `NOISE` where there are fewer than `ENOUGH`."""
        costs = self.cost(arm)
        slack = 1 + NOISE * (len(costs) < ENOUGH)
        return min(costs) / slack, max(costs) * slack


@dataclass(frozen=True, slots=True)
class CompileCost:
    """Cost of compilation with empty caches. costs: seconds of each launch; range: the least and the most of them,
    wider where there are few. paid: after how many calls it has paid, None where that was not timed."""

    subject: str
    costs: tuple[float, ...]
    range: tuple[float, float]
    paid: BreakEven | None = None
