"""What is left of measuring how a subject starts: each launch of a fresh process, and the arms they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from ampcheck.compiled.graph.stats import GraphStats
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Scalar
from ampcheck.speed.stats import ArmTimes

EAGER, COLD, WARM, ARTIFACTS = "eager", "cold", "warm", "artifacts"
REGIONAL, FIXED, DYNAMIC = "cold, regional", "cold, fixed shapes", "cold, dynamic shapes"
CACHED = (WARM, ARTIFACTS)
"""Arms that are to compile nothing anew."""


ENOUGH = 3
"""Launches without which no number of seconds fails: one launch of a process says little."""

NOISE = 0.3
"""How far fewer launches are taken to be off, as a share: six cold starts of one small program on two busy cores lay
from 25 per cent below their median to 31 per cent above it."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """One question to a cache of compiled code.

    cache: `FX graph cache` or `AOTAutograd cache`. result: `hit`, `miss` or `bypass`. reason: PyTorch's own, if it has
    one. parts: what the key was made of, name to value, as PyTorch words it.
    """

    cache: str
    result: str
    key: str = ""
    reason: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Launch:
    """One fresh process, up to its steady state. Seconds throughout.

    imported: `import torch`; loaded: the subject, and what it imports; artifacts_loaded: `load_cache_artifacts`; built:
    the copy of the subject and `torch.compile`, which imports the compiler. passes: the first steps, each until the
    device is done; the first compiles. compiling: of all this the time that PyTorch's compiler says it took. times: the
    eager reference and this arm in turn, block by block; empty where only the start was measured. memory: bytes at the
    peak of a step, None with `memory_untold`. saved: artifacts and their bytes; taken: artifacts that were loaded.
    kernels: None where PyTorch does not tell. binaries: files of machine code that a C++ compiler made at this start.
    off: caches that settings switch off.
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
        """How many lookups ended so."""
        return sum(one.result == result and cache in ("", one.cache) for one in self.lookups)


@dataclass(frozen=True, slots=True)
class StartupArm:
    """A way to start, and its launches. way: mode and precision."""

    name: str
    way: str
    launches: tuple[Launch, ...]

    @property
    def steady(self) -> float:
        """Seconds of a step once warm, from the launch that was measured so far."""
        return next((launch.steady for launch in self.launches if launch.times), self.launches[0].steady)

    @property
    def times(self) -> tuple[ArmTimes, ...]:
        """The eager reference and this arm in turn; empty where no launch was measured so far."""
        return next((launch.times for launch in self.launches if launch.times), ())

    @property
    def memory(self) -> int | None:
        """Bytes at the peak of a step."""
        return next((launch.memory for launch in self.launches if launch.memory is not None), None)

    @property
    def extras(self) -> tuple[float, ...]:
        """Of each launch the seconds that its start takes beyond steps in the steady state."""
        return tuple(launch.extra(self.steady) for launch in self.launches)

    def typical(self, values: Sequence[float]) -> float:
        """The median over the launches."""
        return median(values)


@dataclass(frozen=True, slots=True)
class StartupStats:
    """A subject's starts: eager, and compiled with empty caches, warm caches, artifacts, in parts, with dynamic shapes.

    left_out: arms that did not run, with the reason.
    """

    subject: str
    arms: tuple[StartupArm, ...]
    device: str = "cpu"
    precision: str = "float32"
    left_out: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, Scalar] = field(default_factory=dict)

    def arm(self, name: str) -> StartupArm | None:
        """The arm of this name; None where it did not run."""
        return next((arm for arm in self.arms if arm.name == name), None)

    @property
    def eager(self) -> StartupArm:
        """The arm that all others are compared with. Raises `UsageError` where there is none."""
        if (found := self.arm(EAGER)) is None:
            raise UsageError(f"the start of {self.subject} has no eager arm to be compared with")
        return found

    def times(self, arm: StartupArm) -> tuple[ArmTimes, ...]:
        """Eager and this arm in turn, cycle by cycle; empty where they were not.

        A start with empty caches, with warm ones and with artifacts runs the same code once it runs, so that the times
        of the three are one: what a call saves cannot differ between them.
        """
        same = [one for one in self.arms if one.name in (COLD, *CACHED)] if arm.name in (COLD, *CACHED) else [arm]
        timed = [one.times for one in same if len(one.times) > 1]
        if not timed:
            return ()
        eager, own = ((times[0] for times in timed), (times[-1] for times in timed))
        return tuple(
            replace(parts[0], seconds=tuple(second for part in parts for second in part.seconds))
            for parts in map(list, (eager, own))
        )

    def cost(self, arm: StartupArm) -> tuple[float, ...]:
        """Of each launch the seconds that its start takes beyond the eager one: what compilation costs."""
        own = self.eager.typical(self.eager.extras)
        return tuple(max(extra - own, 0.0) for extra in arm.extras)

    def cost_range(self, arm: StartupArm) -> tuple[float, float]:
        """The cheapest and the dearest launch, in seconds; wider by `NOISE` where there are fewer than `ENOUGH`."""
        costs = self.cost(arm)
        slack = 1 + NOISE * (len(costs) < ENOUGH)
        return min(costs) / slack, max(costs) * slack
