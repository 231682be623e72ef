"""Requires: Eager and compiled code accept the same inputs. Fails where only compiled code raises, and where it
computes with what eager mode refuses in every precision; warns where eager mode raises in low precision alone.

Measured: The subject runs in eager mode and under torch.compile on equal data.

Causes: An op that Inductor lowers wrongly, control flow on tensor values under fullgraph; checks of the data that eager
kernels make and compiled kernels leave out.

Fix: Compile with backend='aot_eager': where it raises as well, tracing is at fault. Report it to PyTorch with the
smaller model; check the data before the compiled region.
"""

from __future__ import annotations

from ampcheck.checks.compile import (
    passed,
)
from ampcheck.core.check import Check
from ampcheck.core.limits import GraphLimits, Limits
from ampcheck.core.run import Finding, Where
from ampcheck.core.subject import EVERY
from ampcheck.core.text import cannot_run
from ampcheck.records.accuracy import AccuracyStats
from ampcheck.records.graphs import GraphStats

CHECK = Check(
    "compiled-exception", "compile", __doc__, subjects=EVERY, needs=("AccuracyStats", "GraphStats"), order=550
)


def check(stats: AccuracyStats | GraphStats, limits: Limits | GraphLimits) -> list[Finding]:
    """Eager mode and compiled code accept the same; the compiled run raises nothing else."""
    return _of_graphs(stats) if isinstance(stats, GraphStats) else _of_results(stats)


def _of_results(stats: AccuracyStats) -> list[Finding]:
    """Eager mode and compiled code accept the same.

    Data that eager mode refuses in every precision is invalid, and compiled code computes garbage with it. Data that
    eager mode refuses in low precision alone, and compiled code does not, is a warning.
    """
    raised, subject = stats.exceptions, stats.name
    if raised.missing:
        return [CHECK.skip(subject, f"not judged: {cannot_run(raised.missing)}")]
    if raised.compiled and raised.eager:
        return [CHECK.skip(subject, f"eager mode raises, and so does compiled code: {raised.eager}")]
    if raised.compiled:
        message = f"what runs in eager mode must run compiled; compiled code raised {raised.compiled}"
        hint = "compile with backend='aot_eager': where it raises as well, tracing is at fault, else code generation"
        return [CHECK.fail(subject, message, where=raised.where, hint=hint)]
    if stats.declined.startswith("Observed exception"):
        message = "what runs in eager mode must run compiled; traced by Dynamo it raises, and falls back to eager "
        message += f"mode without a warning ({stats.declined})"
        hint = "see TORCH_LOGS=graph_breaks; fullgraph=True and torch.export raise here"
        return [CHECK.warn(subject, message, where=Where("compile"), hint=hint)]
    if not stats.graphs:
        return [CHECK.skip(subject, "nothing was compiled: see coverage")]
    if raised.eager and not raised.float32:
        message = (
            f"what runs compiled must run in eager mode; in {stats.format} eager mode raised {raised.eager}, and "
            "compiled code did not"
        )
        hint = "eager mode is what runs at a graph break and without a compiler: bring the operands to one dtype"
        return [CHECK.warn(subject, message, where=raised.where, hint=hint)]
    if raised.eager:
        message = (
            f"what eager mode refuses compiled code must refuse too; eager mode raised {raised.eager}, and compiled "
            "code gave a result"
        )
        hint = "check the data before the compiled region: compiled kernels leave such checks out"
        return [CHECK.fail(subject, message, where=raised.where, hint=hint)]
    return [passed(stats, CHECK, "eager mode and compiled code ran to the end", stats.graphs)]


def _of_graphs(stats: GraphStats) -> list[Finding]:
    """The compiled run raises nothing that the eager run does not."""
    error = stats.error
    if error is not None and error.machine:
        return [CHECK.skip(stats.subject, f"not judged: {cannot_run(error.machine)}")]
    if error is None or error.eager != "" or (error.expected and stats.breaks) or "overwritten" in error.message:
        return []
    message = f"the compiled run must not raise where the eager run does not; it raised {error.message}"
    return [CHECK.fail(stats.subject, message, where=error.where)]
