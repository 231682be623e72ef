"""The record of a training loop that runs in several processes. Plain data, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ampcheck.core.run import Coverage
from ampcheck.health import TensorHealth
from ampcheck.training.reductions.norms import NormStats
from ampcheck.training.reductions.sums import SumStats


@dataclass(frozen=True, slots=True)
class Prediction:
    """A sum over more processes than there are: a ring whose addends are drawn from the measured ones.

    error, once: as in `CollectiveStats`. overflows: whether the exact sum is beyond the format.
    """

    world: int
    error: float
    once: float
    overflows: bool = False

    @property
    def ratio(self) -> float:
        """The error in roundings of the exact sum."""
        return _ratio(self.error, self.once)


@dataclass(frozen=True, slots=True)
class CollectiveStats:
    """The sums of one collective at one line of code, over all of its calls.

    phase: `backward` (the autograd engine ran it: DDP and FSDP2 reduce gradients there), `forward` (of what needs a
    gradient), or `update`. format: of the addends that the collective gets. world: how many processes add up.
    error: Euclidean distance of the result from the float64 sum of the addends, relative to it, of the worst call;
    once: the same of the float64 sum rounded once; vanished: share of the elements whose sum is not zero that are zero;
    overflowed: elements that are infinite or NaN where the sum is finite. cast: whether the addends were known before
    they were cast to that format (a communication hook), and are measured as they were then. divided: whether they were
    divided before. elements: of one call, at most; followed: how many elements were compared, of all calls.
    predicted: at more processes, powers of two to 1024 and the number that the user names.
    """

    op: str
    phase: str
    format: str
    world: int
    calls: int
    elements: int
    followed: int
    error: float
    once: float
    vanished: float = 0.0
    overflowed: int = 0
    cast: bool = False
    divided: bool = False
    predicted: tuple[Prediction, ...] = ()
    file: str = ""
    line: int | None = None

    @property
    def ratio(self) -> float:
        """The error in roundings of the exact sum."""
        return _ratio(self.error, self.once)


def _ratio(error: float, once: float) -> float:
    return error / once if once else 0.0 if not error else float("inf")


@dataclass(frozen=True, slots=True)
class RankState:
    """The tensors of one role and dtype that one process keeps across steps: how many, and their bytes on this rank."""

    rank: int
    role: str
    dtype: str
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DistributedStats:
    """The record of `measure_distributed`.

    skipped: why nothing was measured; empty otherwise. raised: messages of steps that raised. gradients: per parameter,
    all ranks together, at the last step of the optimizer. differing: parameters whose replicas have different
    gradients. autocast: modules that ran under different autocast states, `{module: {state: ranks}}`; modules: how many
    were compared. settings: precision settings that differ, alike. scaled: whether a GradScaler is used. target: the
    number of processes that the user trains with. steps: how many ran.
    """

    subject: str
    world: int = 1
    steps: int = 0
    skipped: str = ""
    raised: tuple[str, ...] = ()
    gradients: Mapping[str, TensorHealth] = field(default_factory=dict)
    differing: tuple[str, ...] = ()
    state: tuple[RankState, ...] = ()
    collectives: tuple[CollectiveStats, ...] = ()
    sums: tuple[SumStats, ...] = ()
    norms: tuple[NormStats, ...] = ()
    autocast: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    modules: int = 0
    settings: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    scaled: bool = False
    target: int | None = None
    coverage: Coverage = field(default_factory=Coverage)
