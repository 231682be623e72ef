"""Requires: A call of a compiled function stays in one graph. Fails with each line at which a graph ends, when one call
meets more graph breaks than max_breaks.

Measured: The subject runs compiled, as it would for its user, and Dynamo's own records of breaks are read: line,
reason, advice. How often a call meets one is counted by the functions that resume after it. Of a model of which one
call is given, where the check is selected.

Causes: An if on a tensor's values, .item() or print for logging, a library that Dynamo cannot follow,
torch.compiler.disable, a try block. Each costs a synchronisation or a round through Python, and what could be fused
across it is not.

Fix: Compute both sides and choose with torch.where or clamp, return what is to be logged as a tensor, set
torch._dynamo.config.capture_scalar_outputs, or accept the break with max_breaks.
"""

from __future__ import annotations

from ampcheck.checks.compile import (
    broken,
    names_of,
    passed_graphs,
    seen_of,
)
from ampcheck.core.check import Check
from ampcheck.core.limits import GraphLimits
from ampcheck.core.run import Finding
from ampcheck.core.subject import EVERY
from ampcheck.core.text import counted
from ampcheck.records.graphs import RESET_BEFORE, GraphStats

CHECK = Check("graph-break", "compile", __doc__, unit="breaks", subjects=EVERY, needs=("GraphStats",), order=500)


def check(stats: GraphStats, limits: GraphLimits) -> list[Finding]:
    """A call runs into no more graph breaks than the limit; one failure for each line."""
    limit = limits.max_breaks
    count = sum(each.times for each in stats.breaks)
    raised = stats.error.kind if stats.error is not None and stats.error.expected and stats.breaks else ""
    if not raised and count <= limit:
        if stats.compiled_before and seen_of(stats):
            message = f"compiled before the block: breaks of {counted(stats.compiled_before, 'functions')} are unknown"
            return [CHECK.skip(stats.subject, message, hint=RESET_BEFORE.replace("the reason", "them"))]
        message = f"{counted(count, 'graph breaks', 'no')} in one call, at most {limit} allowed"
        message += f": {names_of(each.where.place for each in stats.breaks)}" if stats.breaks else ""
        return passed_graphs(CHECK, stats, message, count, limit)
    eager, findings = broken(stats), []
    for graph_break in stats.breaks:
        times = "once" if graph_break.times == 1 else f"{graph_break.times} times"
        message = f"at most {limit} graph breaks are allowed in one call, it has {count}"
        message += f"; {times} the graph ends here: {graph_break.reason}"
        message += f". fullgraph=True raised it: {raised}" if raised else ""
        message += f"; eager because of breaks: {names_of(eager)}" if eager else ""
        hint = graph_break.hint or "rewrite the line with tensor operations, or move it out of the compiled function"
        findings.append(
            CHECK.fail(stats.subject, message, where=graph_break.where, hint=hint, observed=count, limit=limit)
        )
    return findings
