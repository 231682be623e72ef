"""What is blamed for a failure: the record, the verdict and the tables. No torch runs here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ampcheck.catalog.compiled import BLAME
from ampcheck.compiled.accuracy.stats import EAGER, EMULATE, EMULATED, INDUCTOR
from ampcheck.compiled.blame.bisect import Bisected
from ampcheck.compiled.blame.cost import Cost
from ampcheck.compiled.blame.locate import Step
from ampcheck.compiled.blame.minimise import Minimised
from ampcheck.core.run import Coverage, Finding, Table, Where

CODE = "Code that keeps these modules in float32"
"""Title of the table whose rows are the lines to paste."""
LISTED = 12


@dataclass(frozen=True, slots=True)
class Rung:
    """One stage of the ladder: its largest errors against float64, and what was said of it.

    output, gradient: relative errors (inf: a value is not finite where float64's is); None where there are none.
    said: `within` or `beyond` its bound (of compiled code: no worse than eager mode, or worse), or what it raised.
    """

    name: str
    output: float | None
    gradient: float | None
    failed: bool
    said: str


@dataclass(frozen=True, slots=True)
class BlameStats:
    """One arm of a subject, and what was found to blame.

    failures: of the audit of eager mode. rungs: of the ladder, from eager mode up. cause: the first op whose error
    leaves the bound; source: its text. steps: the ops beyond their bound, in order, with the limit of each. bisected:
    the search in the compiled graphs. minimised: the modules to keep in float32, None where none were searched and
    `unsought` says why; rest: what still fails with everything in float32. compiled_too: what became of the compiled
    model with them, None where it was not tried; compiled_setting: of the compiler, with which that passes. setting: of
    the compiler, that mends the failure; left_out: whether leaving the module of the cause out of compilation does.
    """

    subject: str
    failures: tuple[Finding, ...] = ()
    rungs: tuple[Rung, ...] = ()
    cause: Where = field(default_factory=Where)
    source: str = ""
    steps: tuple[tuple[Step, float], ...] = ()
    bisected: Bisected | None = None
    minimised: Minimised | None = None
    unsought: str = ""
    rest: str = ""
    setting: str = ""
    left_out: bool = False
    code: str = ""
    compiled_too: Rung | None = None
    compiled_setting: str = ""
    cost: Cost | None = None
    uncosted: str = ""
    unjudged: str = ""
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def stage(self) -> str:
        """The first rung that fails; "" where none does."""
        return next((rung.name for rung in self.rungs if rung.failed), "")


def check_blame(stats: BlameStats) -> list[Finding]:
    """A failure for an arm that fails, with its stage, its first op and the modules to keep in float32; else a pass."""
    if not stats.rungs:
        return [BLAME.skip(stats.subject, f"not judged: {stats.unjudged}")]
    if not stats.stage:
        said = ", ".join(f"{rung.name} {rung.said}" for rung in stats.rungs)
        return [BLAME.passed(stats.subject, f"nothing to blame: {said} ({stats.coverage})", stats.coverage.total)]
    message = f"every stage must lie within what rounding explains of float64; the first that fails is {_stage(stats)}"
    message += f"; {_cause(stats)}; {_mending(stats)}"
    worst = next(rung for rung in stats.rungs if rung.failed)
    errors = [error for error in (worst.output, worst.gradient) if error is not None]
    observed = max(errors, default=None)
    return [BLAME.fail(stats.subject, message, where=stats.cause, observed=observed, hint=_hint(stats))]


_MEANS: Mapping[str, str] = {
    EAGER: "eager low precision: the format or the model's own arithmetic, not the compiler",
    "aot_eager": "aot_eager: tracing, functionalisation or the derivation of backward, before any code is generated",
    EMULATED: "inductor, also with its casts emulated: a kernel that Inductor generates computes something else",
    INDUCTOR: "inductor, while with its casts emulated it passes: a rounding that the model asks for is fused away",
}


def _stage(stats: BlameStats) -> str:
    rung = next(rung for rung in stats.rungs if rung.failed)
    raised = rung.said.startswith("raised") and rung.name != EAGER
    meaning = f"{rung.name}: it {rung.said}, and eager mode does not" if raised else _MEANS.get(rung.name, rung.name)
    if stats.failures:
        names = list(dict.fromkeys(finding.check for finding in stats.failures))
        meaning += f" ({', '.join(names)})"
    return meaning


def _cause(stats: BlameStats) -> str:
    where = stats.cause
    if not where.op and not where.module and not where.file:
        return "no single op is beyond its bound"
    op = where.op.removeprefix("aten::") or "an op"
    line = f" at {where.file}:{where.line}" if where.file else ""
    source = f" (`{stats.source}`)" if stats.source else ""
    what = (
        "the first op that brings it, once compiled," if stats.bisected else "the first op whose error leaves the bound"
    )
    return f"{what} is {op} in {where.module or '(the root)'}{line}{source}"


def _mending(stats: BlameStats) -> str:
    minimised = stats.minimised
    if minimised is None:
        return f"no modules to keep in float32 were searched: {stats.unsought}"
    if minimised.names is None:
        ended = "" if minimised.minimal else f", of those that {minimised.runs} runs could try"
        rest = f"; with everything in float32 {stats.rest}" if stats.rest else ""
        return f"no set of modules kept in float32 mends it{ended}{rest}"
    names = ", ".join(name or "(the root: the whole model)" for name in minimised.names)
    what = "eager mode" if stats.stage == EAGER else stats.stage
    least = f"the smallest set of modules that mends {what} when kept in float32 is"
    least = least if minimised.minimal else f"{what} is mended, so far, by keeping in float32"
    ended = "" if minimised.minimal else f" (the search ended after {minimised.runs} runs; a smaller set may do)"
    cost = f"; step time: {stats.cost}" if stats.cost is not None and stats.cost.decided else ""
    return f"{least} {names}{ended}{cost}{_compiled_too(stats)}"


def _compiled_too(stats: BlameStats) -> str:
    """What becomes of the compiled model with these modules in float32."""
    rung = stats.compiled_too
    if rung is None:
        return ""
    if not rung.failed:
        return "; compiled with them it passes, too" if rung.said == "within" else f"; compiled with them: {rung.said}"
    mended = f", and passes with {stats.compiled_setting}" if stats.compiled_setting else ""
    return f". Compiled it still fails with them in float32 ({rung.said}){mended}"


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
            parts.append("run the mended model eager, or look at what fails compiled with assert_compiled")
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
    """The ladder, the ops beyond their bound, the modules kept in float32 and the code that keeps them."""
    found = []
    if stats.rungs:
        rows = [(rung.name, rung.output, rung.gradient, rung.said) for rung in stats.rungs]
        columns = ("stage", "worst output", "worst gradient", "verdict")
        note = "Relative errors against float64."
        found.append(Table(f"Ladder: {stats.subject}", columns, rows, "blame", note))
    if stats.steps:
        found.append(_first_ops(stats))
    minimised = stats.minimised
    if minimised is not None and minimised.names is not None:
        rows_ = [(name or "(the root)",) for name in minimised.names]
        note = f"Found in {minimised.runs} run{'s' * (minimised.runs != 1)}" + (
            ", minimal." if minimised.minimal else ", not known to be minimal."
        )
        if stats.cost is None:
            note += f" {stats.uncosted}".rstrip()
        elif not stats.cost.decided:  # a decided one stands in the verdict
            note += f" Step time: {stats.cost}."
        found.append(Table(f"Kept in float32: {stats.subject}", ("module",), rows_, "blame", note))
        lines = [(line,) for line in stats.code.splitlines()]
        found.append(Table(f"{CODE}: {stats.subject}", ("code",), lines, "blame"))
    return tuple(found)


def _first_ops(stats: BlameStats) -> Table:
    rows = [
        (
            step.where.op.removeprefix("aten::"),
            step.where.phase,
            step.where.module or "(the root)",
            f"{step.where.file.rpartition('/')[2]}:{step.where.line}" if step.where.file else "",
            float("inf") if step.nonfinite else step.error,
            limit,
        )
        for step, limit in stats.steps[:LISTED]
    ]
    columns = ("op", "phase", "module", "line", "error", "limit")
    more = len(stats.steps) - len(rows)
    note = "Relative errors against the same op of the float64 run" + (f"; {more} more follow." if more else ".")
    return Table(f"First ops beyond their bound: {stats.subject}", columns, rows, "blame", note)
