"""The frozen record of what was seen inside compiled graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ampcheck.core.run import Coverage, Where


@dataclass(frozen=True, slots=True)
class SiteStats:
    """What was seen of one value of a compiled graph, over all measured calls. Counts are of elements.

    format: whose thresholds count; cast: whether a wider value is rounded to it here. weight: the parameter or buffer
    that is measured; nth: which of several values that are alike in place, format and weight. calls: measured calls.
    amax: the largest finite magnitude, smallest: the smallest nonzero one (infinity if there is none). zeros: exact
    zeros; flushed, subnormals, overflowed: nonzero finite values that the cast makes zero, subnormal, infinite; infs,
    nans: what was so before it.
    bad: calls with a value that is, or by the cast becomes, not finite; born: those of them in which nothing that this
    value was computed from inside the graph was so; last: whether the last call was one of the bad; first: the first
    such call, counted from 0, -1 if there is none. written: the model writes an infinity into it, as masks do; fed: it
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
        firsts = [one for one in (self.first, other.first) if one >= 0]
        summed = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        return replace(
            self,
            **summed,
            order=min(self.order, other.order),
            amax=max(self.amax, other.amax),
            smallest=min(self.smallest, other.smallest),
            last=other.last,
            first=min(firsts, default=-1),
            written=self.written or other.written,
            fed=self.fed or other.fed,
            lost=max(self.lost, other.lost),
        )

    @property
    def key(self) -> tuple[object, ...]:
        """What the same value has in every graph that computes it."""
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
    """What was seen inside the compiled graphs of one run.

    sites: in the order of the graphs, forward before backward. graphs: how many ran with statistics. calls: of these
    graphs; measured: how many of them were measured. perturbation: the largest relative difference between the outputs
    of a graph and of its measured twin on equal inputs, None where no twin was run beside it; perturbed: how many of
    the graphs differ at all. skipped: why nothing could be seen, "" otherwise. unseen: what else was not
    looked at, and how often.
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

    @property
    def coverage(self) -> Coverage:
        """Graphs, sites and values that were seen, and what was not."""
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
