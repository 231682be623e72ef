"""Record of the search for the cause of a failure: the stages of a subject, the search in its graphs, and that for its
modules."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampcheck.core.run import Coverage, Finding, Where
from ampcheck.records.faults import Fault

CODE = "Code that keeps these modules in float32"
"""Title of the table whose rows are the lines to paste."""


@dataclass(frozen=True, slots=True)
class Node:
    """One call of the user's in a graph: where it stands, and its source text."""

    where: Where
    code: str


@dataclass(frozen=True, slots=True)
class Bisected:
    """The first node that brings the failure once it is compiled.

    node: None where the failure did not follow the cut: it did not come back, or came with nothing compiled. nodes: how
    many there are in all graphs. runs: how often the subject ran.
    """

    node: Node | None
    nodes: int
    runs: int


@dataclass(frozen=True, slots=True)
class Minimised:
    """Result of the search for modules.

    names: the modules to keep in float32; None where not even the whole model in float32 passes, or no set was found.
    runs: how many sets were tried. minimal: every set with one module less was tried and fails, and so was every set
    with some children of one only; False where the budget ended the search.
    """

    names: tuple[str, ...] | None
    runs: int
    minimal: bool


@dataclass(frozen=True, slots=True)
class StageResult:
    """One stage: its largest errors against float64, and the verdict.

    output, gradient: relative errors (inf: a value is not finite where float64's is); None where there are none.
    verdict: `within` or `beyond` its bound, what it raised, or why it is not judged.
    """

    name: str
    output: float | None
    gradient: float | None
    failed: bool
    verdict: str


@dataclass(frozen=True, slots=True)
class Cost:
    """The ratio of step times, with the change over without.

    plain: median seconds of the step without the change. median: of the ratios, one for each pair that was measured in
    turns. interval: where the true median lies in at least 95 of 100 such measurements.
    """

    plain: float
    median: float
    interval: tuple[float, float]
    step: str

    @property
    def decided(self) -> bool:
        """True if the interval leaves out 1."""
        low, high = self.interval
        return not low <= 1 <= high

    def __str__(self) -> str:
        low, high = self.interval
        plain = f"the time of a plain {self.step} of {self.plain * 1e3:.3g} ms"
        if not self.decided:
            return f"undecided, {low:.2f} to {high:.2f}x {plain} (95 % confidence)"
        return f"{self.median:.2f}x {plain} (95 % confidence {low:.2f} to {high:.2f})"


@dataclass(frozen=True, slots=True)
class BlameStats:
    """One dtype of a subject, and what is to blame.

    failures: of the audit of eager mode. stages: from eager mode on. cause: the first op at fault; source: its text.
    faults: of the eager run, in order. bisected: the search in the compiled graphs. minimised: the modules to keep in
    float32, None where none were searched and `unsought` says why; rest: what still fails with everything in float32.
    compiled_too: what becomes of the compiled model with them, None where it was not tried; compiled_setting: of the
    compiler, with which that passes. setting: of the compiler, with which the failure is gone; left_out: whether it is
    with the module of the cause left out of compilation.
    """

    subject: str
    failures: tuple[Finding, ...] = ()
    stages: tuple[StageResult, ...] = ()
    cause: Where = field(default_factory=Where)
    source: str = ""
    faults: tuple[Fault, ...] = ()
    bisected: Bisected | None = None
    minimised: Minimised | None = None
    unsought: str = ""
    rest: str = ""
    setting: str = ""
    left_out: bool = False
    code: str = ""
    compiled_too: StageResult | None = None
    compiled_setting: str = ""
    cost: Cost | None = None
    uncosted: str = ""
    unjudged: str = ""
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def stage(self) -> str:
        """The first stage that fails; "" where none does."""
        return next((result.name for result in self.stages if result.failed), "")
