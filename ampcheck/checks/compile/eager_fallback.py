"""Requires: Code inside the compiled region runs compiled. Fails for modules and functions that silently fall back to
eager, though no graph break is the reason.

Measured: While the subject runs after its warm-up, Python's profiling hook records the modules and functions that run
as plain Python. The reason comes from Dynamo's trace: the limit of recompilations, an exception of the backend that
suppress_errors swallowed, or none. Compiled block by block, each block is named.

Causes: More graphs of one function than torch._dynamo.config.recompile_limit (8), as with an integer per layer in
regional compilation; suppress_errors; code in files that Dynamo leaves out; the stance force_eager. A method of a
compiled model besides its call, or model.forward after model.compile(): only the original runs.

Fix: Mend the guard that fails, see recompile; switch suppress_errors off and read the exception; leave out of the
compiled region what is not to be compiled.
"""

from __future__ import annotations

from dataclasses import replace

from ampcheck.checks.compile import (
    broken,
    names_of,
    passed_graphs,
)
from ampcheck.core.check import Check
from ampcheck.core.limits import GraphLimits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.subject import EVERY
from ampcheck.records.graphs import RESET_BEFORE, Fallback, GraphStats

CHECK = Check(
    "eager-fallback",
    "compile",
    __doc__,
    unit="left eager",
    subjects=EVERY,
    needs=("GraphStats",),
    order=520,
    evidence=("tests/corpus/training/betas_move_under_compiled_step",),
)

_HINTS = {
    "recompile limit": "change what the guard checks, so that one graph serves them all; or raise "
    "torch._dynamo.config.recompile_limit",
    "backend error": "look at the exception; with torch._dynamo.config.suppress_errors = False it is raised",
    "unseen": RESET_BEFORE,
    "switched off": "call torch.compiler.set_stance('default'), and set a stance in a with statement, which ends it",
    "left out": "write torch.compile(layer) and use its result, instead of layer.compile(); or compile the module of "
    "your own that calls the layer",
    "skipped": "look at TORCH_LOGS=dynamo for the reason; functions of files that Dynamo leaves out, generators and "
    "code under a dispatch mode are not compiled",
}


def check(stats: GraphStats, limits: GraphLimits) -> list[Finding]:
    """All code inside the compiled region runs compiled; eager code because of a graph break is part of the break."""
    findings = []
    for fallback in stats.fallbacks:
        if fallback.cause == "graph break":
            continue
        names = fallback.names
        what = f"{names[0] or 'the model'} silently falls" if len(names) == 1 else f"{len(names)} modules silently fall"
        if fallback.cause in ("passed by", "not used"):
            findings.append(_passed_by(stats, fallback))
            continue
        message = f"compiled code must not fall back to eager; {what} back"
        message += f" ({names_of(names)})" if len(names) > 1 else ""
        message += f": {fallback.reason}" if fallback.cause == "unseen" else f": {fallback.cause}: {fallback.reason}"
        where = fallback.where if len(names) > 1 else _in_module(fallback)
        hint = _HINTS[fallback.cause]
        findings.append(CHECK.fail(stats.subject, message, where=where, hint=hint, observed=len(names), limit=0))
    if findings:
        return findings
    split = broken(stats)
    message = "nothing runs eager" if not split else f"eager because of graph breaks alone: {names_of(split)}"
    message += " in the trace of compilations; calls could not be counted" if stats.ran is None else ""
    return passed_graphs(CHECK, stats, message, 0, 0)


def _passed_by(stats: GraphStats, fallback: Fallback) -> Finding:
    """The finding for a module that is compiled, and of which only the original ran."""
    sure = fallback.cause == "passed by"
    message = f"what is compiled must run compiled; {fallback.names[0]} is compiled and ran in eager mode alone: "
    message += "no compiled code ran" if sure else "no compiled code ran in the steps that were observed"
    verdict = Verdict.FAIL if sure else Verdict.WARN
    return CHECK.finding(verdict, stats.subject, message, where=fallback.where, hint=fallback.reason)


def _in_module(fallback: Fallback) -> Where:
    return replace(fallback.where, phase="compile", module=fallback.names[0] if "(" not in fallback.names[0] else "")
