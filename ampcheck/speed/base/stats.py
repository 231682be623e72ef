"""Figures of a comparison of two revisions, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from ampcheck.core.run import Scalar
from ampcheck.speed.git import Side
from ampcheck.speed.stats import TWIN

BASE, HEAD = "base", "head"
SIDES = (BASE, TWIN, HEAD)
"""The processes of a round: the base, the base once more, and the head."""

TARGET, EAGER, COMPILED = "target", "eager", "compiled"
"""Arms: the target without a mode or precision of ours, in eager mode, and compiled."""

DECIDED, LAUNCHES, BUDGET_SPENT, UNCHANGED = "decided", "launches", "budget", "unchanged"
"""Why a comparison ended."""


@dataclass(frozen=True, slots=True)
class Turns:
    """One arm in one round: seconds of one call on each side, one value for each cycle; the cycles correspond."""

    base: tuple[float, ...]
    twin: tuple[float, ...]
    head: tuple[float, ...]
    calls: int = 1

    @property
    def cycles(self) -> int:
        """Blocks of each side."""
        return len(self.base)


@dataclass(frozen=True, slots=True)
class Signals:
    """Counts of Dynamo on one side, which do not depend on how busy the machine is.

    unavailable: why there are none. breaks: (location, reason), once for each time. recompiles: (function, guard).
    """

    unavailable: str = ""
    graphs: int = 0
    breaks: tuple[tuple[str, str], ...] = ()
    recompiles: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class BaseStats:
    """The head against a base, over several rounds, each of which launches all sides.

    arms: names; the last is judged, an `eager` before it is the reference of its speedup. rounds: arm to its `Turns`.
    signals: of base and head. failure: why the base could not run. notes: for the reader. idle: that no file that
    differs was imported, if so. settings: the target with device, mode and precision, which identifies a comparison.
    """

    subject: str
    base: Side
    head: Side
    arms: tuple[str, ...] = (TARGET,)
    rounds: tuple[Mapping[str, Turns], ...] = ()
    signals: Mapping[str, Signals] = field(default_factory=dict)
    fingerprint: Mapping[str, Scalar] = field(default_factory=dict)
    conditions: Mapping[str, Scalar] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    failure: str = ""
    spent: float = 0.0
    stopped: str = LAUNCHES
    idle: str = ""
    settings: str = ""

    @property
    def judged(self) -> str:
        """The arm that is judged."""
        return self.arms[-1]

    def turns(self, arm: str) -> list[Turns]:
        """Of an arm, one for each round."""
        return [turns[arm] for turns in self.rounds]

    @property
    def cycles(self) -> int:
        """Paired cycles of all rounds."""
        return sum(turns.cycles for turns in self.turns(self.judged))

    def seconds(self, arm: str, side: str) -> float:
        """Seconds of the typical call of an arm on a side; for tables, never for a verdict."""
        return median(median(turns.base if side == BASE else turns.head) for turns in self.turns(arm))

    def speedup(self, side: str) -> float:
        """How many times faster than eager mode the judged arm is on a side; from medians, for tables."""
        return self.seconds(EAGER, side) / self.seconds(self.judged, side)
