"""Running sums, total norms and sums over ranks beside float64, and ranks that part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ampcheck.core.formats import format_of
from ampcheck.core.run import Coverage, Where
from ampcheck.core.text import counted, listed
from ampcheck.records.protocol import Act

FEWEST = 8
"""A running sum of fewer addends is not judged: it loses little more than one rounding."""


class InRoundings:
    """A record of a sum: its error, and that of the exact sum rounded once, both relative to the exact sum."""

    __slots__ = ()
    error: float
    once: float

    @property
    def ratio(self) -> float:
        """The error in roundings of the exact sum."""
        return self.error / self.once if self.once else 0.0 if not self.error else float("inf")


@dataclass(frozen=True, slots=True)
class SumStats(InRoundings):
    """One running sum, at its longest.

    kind: `sum` (what the user adds up), `gradient` (a parameter's gradient over several backward passes), `graph`
    (addends of a forward, or that backward adds up on its way). format: the narrowest format that the partial sums were
    rounded to. addends: how many; roundings: how often a partial sum was rounded to at most 16 bits. error: Euclidean
    distance from the sum of the same addends in float64, relative to it; once: the same of that sum rounded once.
    overflowed: elements that are infinite or NaN where the exact sum is finite. vanished: the
    share of the addends' nonzero values that had become zero, in float16, before they were added.
    """

    kind: str
    format: str
    addends: int
    roundings: int
    error: float
    once: float
    overflowed: int = 0
    where: Where = field(default_factory=Where)
    vanished: float = 0.0

    @property
    def judged(self) -> bool:
        """True if enough partial sums were rounded to 16 bits, or overflowed."""
        return format_of(self.format).bits <= 16 and (self.roundings >= FEWEST - 1 or bool(self.overflowed))


@dataclass(frozen=True, slots=True)
class NormStats:
    """A total norm: the norm of several norms, or the root of the sum of their powers.

    format: of the total. terms: how many norms went in. grouped: whether one of them was itself a total rounded to at
    most 16 bits, so that the outcome depends on how the tensors were grouped; across processes too. value: what was
    computed. exact: the same in float64, of which each process knows its own part where `sharded`; None where it is not
    known. order: 2 for the Euclidean norm.
    """

    format: str
    terms: int
    grouped: bool
    value: float
    exact: float | None
    order: float = 2.0
    sharded: bool = False
    where: Where = field(default_factory=Where)

    @property
    def low(self) -> bool:
        """True if the total itself has at most 16 bits."""
        return format_of(self.format).bits <= 16

    @property
    def overflowed(self) -> bool:
        """True if it is infinite or NaN where the exact norm is finite."""
        return self.low and not math.isfinite(self.value) and self.exact is not None and math.isfinite(self.exact)

    @property
    def error(self) -> float | None:
        """Relative to the exact norm; None where that is not known or not finite."""
        if not self.exact or not math.isfinite(self.exact):
            return None
        return abs(self.value - self.exact) / self.exact


@dataclass(frozen=True, slots=True)
class ReductionStats:
    """The running sums of 8 addends or more, and the total norms, that some code computed."""

    subject: str
    sums: tuple[SumStats, ...] = ()
    norms: tuple[NormStats, ...] = ()
    coverage: Coverage = field(default_factory=Coverage)


@dataclass(frozen=True, slots=True)
class Prediction(InRoundings):
    """A sum over more processes than there are: a ring whose addends are drawn from the measured ones.

    error, once: as in `CollectiveStats`. overflows: whether the exact sum is beyond the format.
    """

    world: int
    error: float
    once: float
    overflows: bool = False


@dataclass(frozen=True, slots=True)
class CollectiveStats(InRoundings):
    """The sums of one collective at one line of code, over all of its calls.

    where: its op and line, and the phase: `backward` (the autograd engine ran it: DDP and FSDP2 reduce gradients
    there), `forward` (of what needs a gradient), or `update`. format: of the addends that the collective gets. world:
    how many processes add up. error: Euclidean distance of the result from the float64 sum of the addends, relative to
    it, of the worst call; once: the same of the float64 sum rounded once; lost: the largest error of all calls, where a
    sum below a thousandth of all sums at the line counts as that much; vanished: share of the elements whose sum is not
    zero that are zero; overflowed: elements that are infinite or NaN where the sum is finite. cast: whether the addends
    were known before they were cast to that format (a communication hook), and are measured as they were then. divided:
    whether they were divided before. elements: of one call, at most; followed: how many were compared, of all calls.
    predicted: at more processes, powers of two to 1024 and the number that the user names.
    """

    where: Where
    format: str
    world: int
    calls: int
    elements: int
    followed: int
    error: float
    once: float
    lost: float = 0.0
    vanished: float = 0.0
    overflowed: int = 0
    cast: bool = False
    divided: bool = False
    predicted: tuple[Prediction, ...] = ()


@dataclass(frozen=True, slots=True)
class DistributedStats:
    """The record of `measure_distributed`.

    skipped: why nothing was measured; empty otherwise. raised: messages of steps that raised. autocast: modules that
    ran under different autocast states, `{module: {state: ranks}}`; modules: how many were compared. settings:
    precision settings that differ, alike. scaled: whether a GradScaler is used. target: the number of processes that
    the user trains with. steps: how many ran. drift: where parameters that began equal part.
    """

    subject: str
    world: int = 1
    steps: int = 0
    skipped: str = ""
    raised: tuple[str, ...] = ()
    collectives: tuple[CollectiveStats, ...] = ()
    sums: tuple[SumStats, ...] = ()
    norms: tuple[NormStats, ...] = ()
    autocast: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    modules: int = 0
    settings: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    scaled: bool = False
    target: int | None = None
    coverage: Coverage = field(default_factory=Coverage)
    drift: Drift | None = None


@dataclass(frozen=True, slots=True)
class Drift:
    """Ranks that part. step: the first whose update set them apart. ranks: two that differ. names: of the parameters,
    none for shards. act: the call that is at fault; scaler: whether the loss scale or its skips are. proven: whether
    they were replicas by their gradients, by DDP, or by equal values after an update."""

    step: int
    ranks: tuple[int, int]
    names: tuple[str, ...]
    act: Act = Act.BACKWARD
    text: str = ""
    hint: str = ""
    scaler: bool = False
    proven: bool = True


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`; `ranks 0, 2`; of many `ranks 0, 1, 2, 3 and 12 more`."""
    return f"rank{'s' * (len(ranks) != 1)} {listed(map(str, ranks), 8)}"


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """Ranks that hold one model and part. where: the call that is at fault."""

    subject: str
    drift: Drift
    where: Where

    @property
    def message(self) -> str:
        """The requirement, and the tensors that break it."""
        drift = self.drift
        if not drift.names:
            return f"ranks that hold the shards of a model must step them alike; from step {drift.step} on {drift.text}"
        some = f"{counted(len(drift.names), 'parameters')} ({listed(drift.names, 3)}) of {name_ranks(drift.ranks)}"
        return (
            f"replicas of a parameter must stay equal to the bit on all ranks; {some} part in step {drift.step} and do "
            f"not meet again: {drift.text}"
        )
