"""Records of a comparison of two executions, a trial of a kernel, and a golden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ampcheck.core.run import Finding, Scalar, Table, Where

AGREE, ANOTHER, WRONG, UNDECIDED = "agree", "another function", "wrong", "undecided"
"""Outcomes of a comparison."""

INPUTS, STRUCTURE, NUMBERS, RECORDED, COMPILED = "inputs", "structure", "numbers", "recorded", "compiled"
"""Why a comparison that finds two functions names no op: the inputs differ; other results or shapes are returned; what
differs are integers, which have no exact companions; a record keeps no ops;
of compiled code bits are those of no op that is followed."""


@dataclass(frozen=True, slots=True)
class KernelResult:
    """Comparison of a result of a kernel with the reference. error, limit: of its worst row, in roundings.

    message: what is wrong with it, "" for an honest one.
    """

    where: Where
    op: str
    message: str
    error: float = 0.0
    limit: float = 0.0

    @property
    def wrong(self) -> bool:
        """True if it is beyond its bound."""
        return bool(self.message)


@dataclass(frozen=True, slots=True)
class ResultPair:
    """One result of both sides. apart: in roundings; errors and limits: relative, against float64."""

    name: str
    apart: float
    error_a: float
    limit_a: float
    error_b: float
    limit_b: float


@dataclass(frozen=True, slots=True)
class Parity:
    """Conclusion of a comparison.

    outcome: `agree`, `another function`, `wrong` or `undecided`. wrong: the sides that are beyond their bounds. key:
    the result in which it shows. at: the op of `a` and that of `b`. common: the op of the last value that both have.
    roundings: the largest distance of two results, in unit roundoffs of the coarser format. compared: how many results
    were. failures: what the checks of one run say of a side that is wrong. kernels: how opaque ops were judged. pairs:
    the results of both sides. tables: of the tokens of an output. notes: what else is to be known. unplaced: why no op
    is named, "" where each value on the way is one that both have.
    """

    outcome: str
    message: str
    subject: str = "a and b"
    wrong: tuple[str, ...] = ()
    key: str = ""
    at: tuple[Where | None, Where | None] = (None, None)
    common: Where | None = None
    roundings: float = 0.0
    compared: int = 0
    failures: tuple[Finding, ...] = ()
    kernels: tuple[KernelResult, ...] = ()
    pairs: tuple[ResultPair, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    unplaced: str = ""


PASSED, REFUSED, SAYS_NOTHING, LEFT_OUT, REPEATED = "passed", "refused", "says nothing", "left out", "repeated"
"""Outcomes of a case. It says nothing where all exact results are zero or undetermined, and is left out where the
reference raises, or is beyond the bound of its own rounding. A case that is repeated gave the same bits each time,
which says nothing of the reference."""


@dataclass(frozen=True, slots=True)
class Tried:
    """Outcome of a kernel on one case. error, limit: of its worst result, in unit roundoffs. silent: results that the
    case says nothing of."""

    case: str
    outcome: str
    result: str = ""
    error: float = 0.0
    limit: float = 0.0
    reason: str = ""
    silent: tuple[str, ...] = ()

    @property
    def nearness(self) -> float:
        """The error as a multiple of its limit."""
        return self.error / (self.limit or 1.0)


@dataclass(frozen=True, slots=True)
class KernelTrial:
    """Cases that were tried of a kernel, with their outcomes and the machine."""

    kernel: str
    reference: str
    tried: tuple[Tried, ...]
    environment: Mapping[str, Scalar] = field(default_factory=dict)

    def of(self, outcome: str) -> tuple[Tried, ...]:
        """The cases with this outcome."""
        return tuple(tried for tried in self.tried if tried.outcome == outcome)

    @property
    def unjudged(self) -> tuple[str, ...]:
        """The results that every case that passed says nothing of."""
        silent = [set(tried.silent) for tried in self.of(PASSED)]
        return tuple(sorted(set.intersection(*silent))) if silent else ()


@dataclass(frozen=True, slots=True)
class GoldenComparison:
    """A run beside its golden.

    file: of the goldens, as messages name it. made_in: where the golden was recorded, None where there is none of this
    name. written: it was written just now. results: how many there are. gone, new: names of results that one of the two
    lacks. differing: by name, how exact values differ. undetermined: those of them of which the data determine nothing.
    digits: of the results that rounding leaves. failures: what the checks of one run say of the run itself. opaque: ops
    that cannot be followed; behind_opaque: results that they may have made. changed: by name, how arguments differ from
    those of the recorded run; shaken: in their last digits alone. beyond_shaking: results that differ by more than last
    digits of the arguments explain. worse: by name, the relative errors of the run and of the recorded one, where other
    roundings of the same sums do not explain the first.
    """

    name: str
    file: str
    made_in: str | None = None
    written: bool = False
    results: int = 0
    gone: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    differing: Mapping[str, str] = field(default_factory=dict)
    undetermined: tuple[str, ...] = ()
    digits: float | None = None
    failures: tuple[Finding, ...] = ()
    opaque: tuple[str, ...] = ()
    behind_opaque: tuple[str, ...] = ()
    changed: Mapping[str, str] = field(default_factory=dict)
    shaken: Mapping[str, str] = field(default_factory=dict)
    beyond_shaking: tuple[str, ...] = ()
    worse: Mapping[str, tuple[float, float]] = field(default_factory=dict)
