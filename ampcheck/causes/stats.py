"""What is blamed for a failure: the record, the verdict and the tables. No torch runs here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from ampcheck.catalog.compiled import BLAME
from ampcheck.causes.bisect import Bisected
from ampcheck.causes.minimise import Minimised
from ampcheck.compiled.accuracy.stats import AOT_EAGER, EAGER, EMULATE, EMULATED, INDUCTOR
from ampcheck.core.run import Coverage, Finding, Table, Where
from ampcheck.core.source import op_name
from ampcheck.shadow import Fault
from ampcheck.speed.verdict import CONFIDENCE, median_bounds

CODE = "Code that keeps these modules in float32"
"""Title of the table whose rows are the lines to paste."""
LISTED = 12


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
    """Ratios of step times, with the change over without, one for each pair that was measured in turns.

    plain: median seconds of the step without the change.
    """

    plain: float
    ratios: tuple[float, ...]
    step: str

    @property
    def median(self) -> float:
        """Of the ratios."""
        return median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true median lies in at least 95 of 100 such measurements, by order statistics (the sign test)."""
        return median_bounds(np.asarray(self.ratios), CONFIDENCE)

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out 1."""
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


def check_blame(stats: BlameStats) -> list[Finding]:
    """A failure with its stage, its first op and the modules to keep in float32; else a pass."""
    if not stats.stages:
        return [BLAME.skip(stats.subject, f"not judged: {stats.unjudged}")]
    worst = next((result for result in stats.stages if result.failed), None)
    if worst is None:
        verdicts = ", ".join(f"{result.name} {result.verdict}" for result in stats.stages)
        text = f"nothing to blame: {verdicts} ({stats.coverage})"
        return [BLAME.passed(stats.subject, text, stats.coverage.total)]
    message = (
        "every stage must lie as near to float64 as rounding allows; the first that fails is "
        f"{_stage(stats, worst)}; {_cause(stats)}; {_modules(stats)}"
    )
    observed = max((error for error in (worst.output, worst.gradient) if error is not None), default=None)
    return [BLAME.fail(stats.subject, message, where=stats.cause, observed=observed, hint=_hint(stats))]


_MEANS: Mapping[str, str] = {
    EAGER: "eager low precision: the format or the model's own arithmetic, not the compiler",
    AOT_EAGER: "aot_eager: tracing, functionalisation or the derivation of backward, before any code is generated",
    EMULATED: "inductor, also with its casts emulated: a kernel that Inductor generates computes something else",
    INDUCTOR: "inductor, while with its casts emulated it passes: a rounding that the model asks for is fused away",
}


def _stage(stats: BlameStats, result: StageResult) -> str:
    raised = result.verdict.startswith("raised") and result.name != EAGER
    meaning = f"{result.name}: it {result.verdict}, and eager mode does not" if raised else _MEANS[result.name]
    names = dict.fromkeys(finding.check for finding in stats.failures)
    return f"{meaning} ({', '.join(names)})" if names else meaning


def _cause(stats: BlameStats) -> str:
    where = stats.cause
    if not where.op and not where.module and not where.file:
        return "no single op is at fault"
    op = op_name(where) or "an op"
    line = f" at {where.file}:{where.line}" if where.file else ""
    source = f" (`{stats.source}`)" if stats.source else ""
    what = "the first op that brings it, once compiled," if stats.bisected else "the first op at fault"
    return f"{what} is {op} in {where.module or '(the root)'}{line}{source}"


def _modules(stats: BlameStats) -> str:
    minimised = stats.minimised
    if minimised is None:
        return f"no modules to keep in float32 were searched: {stats.unsought}"
    if minimised.names is None:
        ended = "" if minimised.minimal else f", of those that {minimised.runs} runs could try"
        rest = f"; with everything in float32 {stats.rest}" if stats.rest else ""
        return f"with no set of modules kept in float32 it passes{ended}{rest}"
    names = ", ".join(name or "(the root: the whole model)" for name in minimised.names)
    what = "eager mode" if stats.stage == EAGER else stats.stage
    ended = "" if minimised.minimal else f" (the search ended after {minimised.runs} runs; a smaller set may do)"
    least = f"the {'smallest ' * minimised.minimal}set of modules in float32 with which {what} passes is"
    cost = f"; step time: {stats.cost}" if stats.cost is not None and stats.cost.decided else ""
    return f"{least} {names}{ended}{cost}{_compiled_too(stats)}"


def _compiled_too(stats: BlameStats) -> str:
    """What becomes of the compiled model with these modules in float32."""
    result = stats.compiled_too
    if result is None:
        return ""
    if not result.failed:
        return "; compiled with them it passes, too" if result.verdict == "within" else f"; compiled: {result.verdict}"
    setting = f", and passes with {stats.compiled_setting}" if stats.compiled_setting else ""
    return f". Compiled it still fails with them in float32 ({result.verdict}){setting}"


def _hint(stats: BlameStats) -> str:
    parts = []
    if stats.setting:
        parts.append(f"set {stats.setting}, with which it passes")
    elif stats.stage == INDUCTOR:
        parts.append(f"set {EMULATE} = True, with which it passes")
    if stats.minimised is not None and stats.minimised.names is not None:
        parts.append(f"paste the code of the table '{CODE}' and call keep_in_float32(model)")
        if stats.compiled_setting:
            parts.append(f"under torch.compile also set {stats.compiled_setting}, with which it passes")
        elif stats.compiled_too is not None and stats.compiled_too.failed:
            parts.append("run the changed model eager, or look at what fails compiled with assert_compiled")
    elif stats.stage == EAGER and stats.cause.op:
        parts.append("compute this op in float32 where it stands: it is in no module of its own, or casts by itself")
    if stats.left_out:
        parts.append(
            f"leave this module out of compilation, with which it passes: left = model.get_submodule("
            f"{stats.cause.module!r}); left.forward = torch.compiler.disable(left.forward)"
        )
    return "; ".join(parts)


def is_code(table: Table) -> bool:
    """Whether the rows of a table are lines of code, to be printed as they are."""
    return table.title.startswith(CODE)


def tables(stats: BlameStats) -> tuple[Table, ...]:
    """The stages, the faults of eager mode, the modules to keep in float32 and the code that keeps them."""
    result = []
    if stats.stages:
        rows = [(stage.name, stage.output, stage.gradient, stage.verdict) for stage in stats.stages]
        columns = ("stage", "worst output", "worst gradient", "verdict")
        note = "Relative errors against float64."
        result.append(Table(f"Stages: {stats.subject}", columns, rows, "blame", note))
    if stats.faults:
        result.append(_first_faults(stats))
    minimised = stats.minimised
    if minimised is not None and minimised.names is not None:
        names = [(name or "(the root)",) for name in minimised.names]
        count = f"{minimised.runs} run{'s' * (minimised.runs != 1)}"
        note = f"Searched in {count}, {'minimal' if minimised.minimal else 'not known to be minimal'}."
        if stats.cost is None:
            note += f" {stats.uncosted}".rstrip()
        elif not stats.cost.decided:  # a decided one is in the verdict
            note += f" Step time: {stats.cost}."
        result.append(Table(f"Kept in float32: {stats.subject}", ("module",), names, "blame", note))
        lines = [(line,) for line in stats.code.splitlines()]
        result.append(Table(f"{CODE}: {stats.subject}", ("code",), lines, "blame"))
    return tuple(result)


def _first_faults(stats: BlameStats) -> Table:
    rows = [
        (
            op_name(fault.where),
            fault.kind,
            fault.where.phase,
            fault.where.module or "(the root)",
            f"{fault.where.file.rpartition('/')[2]}:{fault.where.line}" if fault.where.file else "",
            float("inf") if fault.examination.lost else fault.examination.error,
            fault.examination.limit,
        )
        for fault in stats.faults[:LISTED]
    ]
    columns = ("op", "fault", "phase", "module", "line", "error", "limit")
    more = len(stats.faults) - len(rows)
    note = "Relative errors against the exact values of the same run" + (f"; {more} more follow." if more else ".")
    return Table(f"First ops at fault: {stats.subject}", columns, rows, "blame", note)
