"""What a comparison of two revisions leaves behind, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from ampcheck.core.run import Scalar
from ampcheck.speed.stats import TWIN

BASE, HEAD = "base", "head"
SIDES = (BASE, TWIN, HEAD)
"""The processes of a round: the base, the base once more, and the head."""

AS_IT_IS, EAGER, COMPILED = "as it is", "eager", "compiled"
"""Arms: the subject without a mode or precision of ours, in eager mode, and compiled."""


DECIDED, LAUNCHES, BUDGET_SPENT, UNCHANGED = "decided", "launches", "budget", "unchanged"
"""Why a comparison ended."""


@dataclass(frozen=True, slots=True)
class Turns:
    """One arm in one round: seconds of one call on each side, one value for each cycle; the cycles correspond."""

    base: tuple[float, ...]
    twin: tuple[float, ...]
    head: tuple[float, ...]
    calls: int = 1

    def of(self, side: str) -> tuple[float, ...]:
        """The seconds of one of `SIDES`."""
        return {BASE: self.base, TWIN: self.twin, HEAD: self.head}[side]

    @property
    def cycles(self) -> int:
        """How many blocks each side ran."""
        return len(self.base)


@dataclass(frozen=True, slots=True)
class Signals:
    """What Dynamo told of one side; it does not depend on how busy the machine is.

    untold: why nothing was told. breaks: (place, reason), as often as a place was met. recompiles: (function, guard).
    """

    untold: str = ""
    graphs: int = 0
    ops: int = 0
    breaks: tuple[tuple[str, str], ...] = ()
    recompiles: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Side:
    """Which code a side ran. name: as it was asked for; revision: the commit, abbreviated; title: its first line;
    changed: files that differ from the commit; how: `merge base` where the commit is that of the name and the head."""

    name: str
    revision: str
    title: str = ""
    changed: int = 0
    how: str = ""

    def __str__(self) -> str:
        name = f"{self.how} with {self.name}" if self.how else self.name
        return self.revision if name in (self.revision, "") else f"{name}, {self.revision}"


@dataclass(frozen=True, slots=True)
class BaseStats:
    """The head against a base, over several rounds; each round launches every side anew.

    arms: names; the last is judged, an `eager` before it is the reference of its speedup. rounds: arm to its `Turns`.
    signals: of base and head, where something compiles. failure: why the base could not run; then there are no rounds.
    notes: what a reader has to know, a sentence each. idle: that nothing of what differs was imported, if so. stopped:
    `decided`, `launches` where no more were allowed, `budget` where it was spent, `unchanged` where no file differs, so
    that nothing was measured. asked: the target with what was asked of it, which tells one comparison from another.
    """

    subject: str
    base: Side
    head: Side
    arms: tuple[str, ...] = (AS_IT_IS,)
    rounds: tuple[Mapping[str, Turns], ...] = ()
    signals: Mapping[str, Signals] = field(default_factory=dict)
    fingerprint: Mapping[str, Scalar] = field(default_factory=dict)
    conditions: Mapping[str, Scalar] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    failure: str = ""
    spent: float = 0.0
    stopped: str = LAUNCHES
    idle: str = ""
    asked: str = ""

    @property
    def judged(self) -> str:
        """The arm that is judged."""
        return self.arms[-1]

    @property
    def cycles(self) -> int:
        """Paired cycles of all rounds."""
        return sum(one[self.judged].cycles for one in self.rounds)

    def seconds(self, arm: str, side: str) -> float:
        """Seconds of the typical call of an arm on a side; good for a picture, never for a verdict."""
        return median(median(one[arm].of(side)) for one in self.rounds)
