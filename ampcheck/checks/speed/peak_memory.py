"""Requires: A compiled step needs at most 1.1 times the memory of an eager one, with 1 MiB of slack, or the given
limit. Skipped with the reason if memory cannot be measured.

Measured: The highest sum of tensors beyond the memory in use when the step begins: on the CPU by the allocations that
PyTorch's profiler records, to the byte and the same from run to run; on an accelerator max_memory_allocated, from
before the first step, so that pools count. Scratch space of libraries, and on the CPU allocations of other threads, are
not measured.

Causes: Activations that the compiled graph saves and eager mode frees, pools of CUDA graphs, padding and workspaces of
max-autotune, an input that stays alive because a graph break ends the graph.

Fix: Lower torch._functorch.config.activation_memory_budget, checkpoint blocks, do without reduce-overhead, or raise the
limit if the speed is worth it.
"""

from __future__ import annotations

from ampcheck.checks.speed import WHERE
from ampcheck.core.check import Check, Evidence
from ampcheck.core.limits import StartupLimits
from ampcheck.core.run import Finding, Verdict
from ampcheck.records.startup import COLD, StartupStats

CHECK = Check("peak-memory", "speed", __doc__, needs=("StartupStats",), order=804)

_SLACK = 2**20
"""Bytes that a step may need beyond the limit of memory."""

_MEMORY = (
    "look for activations that the compiled graph saves and eager frees: torch._functorch.config."
    "activation_memory_budget below 1 recomputes more; CUDA graphs keep a pool of their own"
)


def check(stats: StartupStats, limits: StartupLimits) -> list[Finding]:
    """A compiled step needs at most `memory` times the memory of an eager one, and at most `bytes`."""
    arm = stats.arm(COLD)
    if arm is None or (limits.memory is None and limits.bytes is None):
        return []
    eager, peak = stats.eager.timed.memory, arm.timed.memory
    if peak is None or (eager is None and limits.bytes is None):
        reasons = [launch.memory_untold for known in (arm, stats.eager) for launch in known.launches]
        reason = next(filter(None, reasons), "it was not measured")
        return [CHECK.skip(stats.subject, f"the peak memory of a step is not known: {reason}", where=WHERE)]
    bounds = []
    if limits.memory is not None and eager is not None:
        ratio = f", {peak / eager:.3g} times as much" if eager else ""
        required = f"{limits.memory:g} times the memory of an eager one ({_mib(eager)}), and 1 MiB"
        bounds.append((eager * limits.memory + _SLACK, required, ratio))
    if limits.bytes is not None:
        bounds.append((limits.bytes, _mib(limits.bytes), ""))
    findings = []
    for limit, required, ratio in bounds:
        message = f"a compiled step may need {required}; it needs {_mib(peak)}{ratio}"
        verdict = Verdict.PASS if peak <= limit else Verdict.FAIL
        evidence = Evidence(where=WHERE, observed=peak, limit=limit, hint=_MEMORY)
        findings.append(CHECK.judged(verdict, stats.subject, message, len(arm.launches), **evidence))
    return findings


def _mib(count: float) -> str:
    return f"{count / 2**20:,.4g} MiB"
