"""The frozen record of the statistics inside compiled graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ampcheck.core.run import Coverage, Where

EAGER_MODULES = "modules that are not compiled"
"""Reason why parts of a model that run outside of its graphs stay unseen."""


@dataclass(frozen=True, slots=True)
class SiteStats:
    """The statistics of one value of a compiled graph, over all measured calls. Counts are of elements.

    format: whose thresholds count; cast: whether a wider value is rounded to it here. weight: the parameter or buffer
    that is measured; nth: which of several values that are alike in location, format and weight. calls: measured calls.
    amax: the largest finite magnitude, smallest: the smallest nonzero one (infinity if there is none). zeros: exact
    zeros; flushed, subnormals, overflowed: nonzero finite values that the cast makes zero, subnormal, infinite; infs,
    nans: infinite or NaN before it.
    bad: calls with a value that is, or by the cast becomes, not finite; born: those of them in which no value that this
    one was computed from inside the graph was; last: whether the last call was one of the bad; first: the first such
    call, counted from 0, -1 if there is none. written: the model writes an infinity into it, as masks do; fed: it
    depends on inputs of the graph that are no weights.
    emptied: calls in which the cast made every nonzero element zero. lost: the largest part of the Euclidean norm that
    the flushed elements can have had in one call.
    """

    where: Where
    format: str
    cast: bool
    weight: str = ""
    nth: int = 0
    order: tuple[int, int] = (0, 0)
    calls: int = 0
    numel: int = 0
    amax: float = 0.0
    smallest: float = float("inf")
    zeros: int = 0
    flushed: int = 0
    subnormals: int = 0
    overflowed: int = 0
    infs: int = 0
    nans: int = 0
    bad: int = 0
    born: int = 0
    last: bool = False
    first: int = -1
    written: bool = False
    fed: bool = False
    emptied: int = 0
    lost: float = 0.0

    def __add__(self, other: SiteStats) -> SiteStats:
        return replace(
            self,
            **{name: getattr(self, name) + getattr(other, name) for name in _SUMMED},
            order=min(self.order, other.order),
            amax=max(self.amax, other.amax),
            smallest=min(self.smallest, other.smallest),
            last=other.last,
            first=min((first for first in (self.first, other.first) if first >= 0), default=-1),
            written=self.written or other.written,
            fed=self.fed or other.fed,
            lost=max(self.lost, other.lost),
        )

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same value in every graph that computes it."""
        return self.where, self.format, self.cast, self.weight, self.nth

    @property
    def nonzero(self) -> int:
        """Finite elements that are not zero before the cast."""
        return self.numel - self.zeros - self.infs - self.nans


_SUMMED = (
    *("calls", "numel", "zeros", "flushed", "subnormals", "overflowed", "infs", "nans"),
    *("bad", "born", "emptied"),
)


@dataclass(frozen=True, slots=True)
class TelemetryStats:
    """The statistics inside the compiled graphs of one run.

    sites: in the order of the graphs, forward before backward. graphs: how many ran with statistics. calls: of these
    graphs; measured: how many of them were measured. perturbation: the largest relative difference between the outputs
    of a graph with and without statistics on equal inputs, None where none were compared; perturbed: how many of the
    graphs differ at all. skipped: why nothing could be measured, "" otherwise. unseen: what else was not measured, and
    how often. harmed: whether the results of the run were judged to be wrong; None where they were not judged (a user's
    own loop): then a defect fails when its damage is seen later in the graphs.
    """

    subject: str
    level: str
    every: int = 1
    sites: tuple[SiteStats, ...] = ()
    graphs: int = 0
    calls: int = 0
    measured: int = 0
    perturbation: float | None = None
    perturbed: int = 0
    skipped: str = ""
    unseen: Mapping[str, int] = field(default_factory=dict)
    harmed: bool | None = None

    @property
    def finite_sites(self) -> int:
        """Number of sites with a finite value; one that was always inf or NaN cannot lose any."""
        return sum(site.numel > site.infs + site.nans for site in self.sites)

    @property
    def coverage(self) -> Coverage:
        """Graphs, sites and values that were measured, and what was not."""
        seen = {
            "graphs": self.graphs,
            "sites": len(self.sites),
            "measured calls": self.measured,
            "values": sum(site.numel for site in self.sites),
        }
        unseen = dict(self.unseen)
        if self.every > 1 and self.calls > self.measured:
            unseen[f"calls of graphs that ran plain: one in {self.every} is measured"] = self.calls - self.measured
        return Coverage({name: count for name, count in seen.items() if count}, unseen)
