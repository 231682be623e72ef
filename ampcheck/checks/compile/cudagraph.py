"""Requires: Where the mode asks for CUDA graphs, each graph becomes one, and no output is read after the next run has
overwritten it. Skipped without a CUDA device.

Measured: Inductor's own reasons for leaving out CUDA graphs are read, and the exception that PyTorch raises for an
output that was overwritten. With mode max-autotune a graph left out is a warning.

Causes: Tensors on the CPU, inputs changed in place, dynamic shapes, outputs kept from step to step.

Fix: Keep all inputs on the device, clone outputs that are kept, or call torch.compiler.cudagraph_mark_step_begin()
before each step.
"""

from __future__ import annotations

from ampcheck.checks.compile import (
    names_of,
    seen_of,
)
from ampcheck.core.check import Check
from ampcheck.core.limits import GraphLimits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.subject import EVERY
from ampcheck.records.graphs import GraphStats

CHECK = Check("cudagraph", "compile", __doc__, subjects=EVERY, needs=("GraphStats",), order=540)


def check(stats: GraphStats, limits: GraphLimits) -> list[Finding]:
    """Where CUDA graphs are asked for, every graph becomes one, and no output is read after it was overwritten.

    Code that is compiled already, or compiles by itself, has asked for them where one was skipped.
    """
    if stats.error is not None and "overwritten by a subsequent run" in stats.error.message:
        message = f"no output may be read after the next run has overwritten it; it was: {stats.error.message}"
        hint = "clone the output, or call torch.compiler.cudagraph_mark_step_begin() before each step"
        return [CHECK.fail(stats.subject, message, where=stats.error.where, hint=hint)]
    if not stats.wants_cudagraphs and not stats.skips:
        return []
    asks = stats.wants_cudagraphs or "a mode or option of the compiled code's own"
    on_cpu = bool(stats.skips) and all("cpu device" in reason for reason in stats.skips)
    if stats.device.startswith("cpu") or (on_cpu and not stats.wants_cudagraphs):
        message = f"{asks} asks for CUDA graphs, which need a CUDA device; this is cpu"
        return [CHECK.skip(stats.subject, message)]
    if stats.skips:
        # max-autotune wants speed, with CUDA graphs or without; a mode that is not known may be that one.
        sure = stats.wants_cudagraphs and "autotune" not in stats.wants_cudagraphs
        reasons = names_of(f"{reason} ({count})" for reason, count in stats.skips.items())
        message = f"{asks} asks for CUDA graphs; they were skipped: {reasons}"
        hint = "keep every input on the device and unchanged in place, or leave out the mode"
        verdict = Verdict.FAIL if sure else Verdict.WARN
        return [CHECK.finding(verdict, stats.subject, message, where=Where("compile"), hint=hint)]
    return [CHECK.passed(stats.subject, "no CUDA graph was skipped", seen_of(stats))]
