"""Requires: A subject passes at every stage from eager low precision to torch.compile. Where it does not, the verdict
names the stage, the first op at fault, and the smallest set of modules that fixes it in float32.

Measured: Eager low precision is judged as in an audit, compiled code as by compiled-error, at aot_eager, Inductor with
emulated casts, and Inductor. In eager mode the shadow names the first op at fault; in compiled code the first k nodes
of the graphs are compiled, the rest run eagerly, and k is bisected. The modules are found by delta debugging on the
tree of modules, each set tried by running the code that is printed; the step is timed in pairs with and without it.

Causes: Those of the check that fails: see its page.

Fix: Paste the code and call keep_in_float32(model), set what the hint names, or leave the module out of compilation.
Where no set of modules fixes it, fix the op at the line that is named.
"""

from __future__ import annotations

from collections.abc import Mapping

from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.source import op_name
from ampcheck.records.accuracy import AOT_EAGER, EAGER, EMULATE, EMULATED, INDUCTOR
from ampcheck.records.blame import CODE, BlameStats, StageResult

CHECK = Check("blame", "compile", __doc__, unit="relative error", needs=("BlameStats",), order=590)

_MEANS: Mapping[str, str] = {
    EAGER: "eager low precision: the format or the model's own arithmetic, not the compiler",
    AOT_EAGER: "aot_eager: tracing, functionalisation or the derivation of backward, before any code is generated",
    EMULATED: "inductor, also with its casts emulated: a kernel that Inductor generates computes something else",
    INDUCTOR: "inductor, while with its casts emulated it passes: a rounding that the model asks for is fused away",
}


def check(stats: BlameStats, limits: Limits) -> list[Finding]:
    """A failure with its stage, its first op and the modules to keep in float32; else a pass."""
    if not stats.stages:
        return [CHECK.skip(stats.subject, f"not judged: {stats.unjudged}")]
    worst = next((result for result in stats.stages if result.failed), None)
    if worst is None:
        verdicts = ", ".join(f"{result.name} {result.verdict}" for result in stats.stages)
        text = f"nothing to blame: {verdicts} ({stats.coverage})"
        return [CHECK.passed(stats.subject, text, stats.coverage.total)]
    message = (
        "every stage must lie as near to float64 as rounding allows; the first that fails is "
        f"{_stage(stats, worst)}; {_cause(stats)}; {_modules(stats)}"
    )
    observed = max((error for error in (worst.output, worst.gradient) if error is not None), default=None)
    return [CHECK.fail(stats.subject, message, where=stats.cause, observed=observed, hint=_hint(stats))]


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
    """Return what becomes of the compiled model with these modules in float32."""
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
