"""Requires: A call of torch.compiler.save_cache_artifacts saves artifacts, and those that load_cache_artifacts loads
are used. Fails otherwise, with the calling line.

Measured: Calls of the two functions are recorded in this process and in Python processes that it starts, with the
graphs compiled before and after; loaded keys are compared with those that the caches hit. A child process reports
through a file, by a sitecustomize on PYTHONPATH; one started with -I, -E or -S does not.

Causes: Saving before the first compiled call, or in a process that did not compile; loading after it; another release,
model, shape or setting than when it was saved.

Fix: Run the compiled function once, forward and backward, then save; load before its first call.
"""

from __future__ import annotations

from ampcheck.core.check import Check
from ampcheck.core.limits import GraphLimits
from ampcheck.core.run import Finding
from ampcheck.core.subject import Kind
from ampcheck.core.text import counted
from ampcheck.records.graphs import Artifacts, GraphStats

CHECK = Check(
    "cache-artifacts",
    "compile",
    __doc__,
    subjects=(Kind.FORWARD, Kind.COMPILE, Kind.REGIONAL, Kind.CALL),
    needs=("GraphStats",),
    order=530,
)


def check(stats: GraphStats, limits: GraphLimits | None = None) -> list[Finding]:
    """Artifacts are saved after compilation, and those that were loaded are used."""
    findings = []
    for call in stats.artifacts:
        message, hint = _failure(call)
        if message:
            message = f"{message} ({call.process})"
            findings.append(CHECK.fail(stats.subject, message, where=call.where, hint=hint))
            continue
        message = f"{call.hits} of {call.keys} loaded artifacts were used"
        if call.action == "save":
            message = f"torch.compiler.save_cache_artifacts saved {call.keys} artifacts of {call.compiled} graphs"
        message = f"{message} ({call.process})"
        findings.append(CHECK.passed(stats.subject, message, call.keys, where=call.where))
    return findings


def _failure(call: Artifacts) -> tuple[str, str]:
    """Message and hint of a call that saved nothing or loaded for nothing; "" for all others."""
    if call.action == "save" and not call.keys:
        message = "torch.compiler.save_cache_artifacts must be called after compilation; it returned None "
        message += f"and saved nothing, with {counted(call.compiled, 'graphs', 'no')} compiled before it"
        if call.compiled:
            return message, "caches are off or were bypassed: look at torch._inductor.config.fx_graph_cache"
        return message, "run the compiled function first, and its backward, in the process that saves"
    if call.action == "load" and not call.keys:
        message = "torch.compiler.load_cache_artifacts must load what was saved; it found no artifact in its bytes"
        return message, "save and load with one release of PyTorch, and pass on the bytes, the first of the pair"
    if call.action == "load" and not call.hits:
        message = f"loaded artifacts must be used; none of {call.keys} was, and {counted(call.later, 'graphs', 'no')} "
        message += "compiled afterwards"
        hint = "load before the first compiled call; model, inputs, PyTorch, device and settings must be the same"
        return message, hint
    return "", ""
