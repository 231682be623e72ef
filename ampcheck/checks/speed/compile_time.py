"""Requires: Compilation with empty caches costs no more seconds than the limit, and pays off after no more calls than
the limit. Judged only if a limit is given.

Measured: The cost is the time of the first steps beyond that of as many steps in the steady state, imports of the
compiler included, less the same for eager mode. The saving of a call is the typical eager time and the paired ratio to
it, measured block by block in one process. The number of calls is cost divided by saving, with a bootstrap interval,
and infinite if compiled code is not faster. Fewer than three launches are assumed to be 30 % off and never fail.

Causes: Many different blocks, one graph for each shape, max-autotune, a backward; a machine with a slow C++ compiler; a
step so short that nothing can be saved.

Fix: Compile repeated blocks, not the whole (module.compile() on each); mark varying dimensions with
torch._dynamo.mark_dynamic; keep the caches or ship artifacts; leave short runs eager.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from ampcheck.checks.speed import WHERE
from ampcheck.core.check import Check, Evidence
from ampcheck.core.limits import StartupLimits
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.text import counted
from ampcheck.records.startup import ENOUGH, CompileCost

CHECK = Check("compile-time", "speed", __doc__, needs=("CompileCost",), order=803)

_FASTER = (
    "compile repeated blocks instead of the whole (module.compile() on each), keep the cache folder or ship artifacts "
    "(torch.compiler.load_cache_artifacts), and leave max-autotune out where calls are few"
)


def check(compiled: CompileCost, limits: StartupLimits) -> Iterator[Finding]:
    """Compilation costs no more than the limit, and pays off in time."""
    if limits.compile is not None:
        yield _cost(compiled, limits.compile)
    if limits.calls is not None:
        yield _break_even(compiled, limits.calls)


def _cost(compiled: CompileCost, limit: float) -> Finding:
    """Compilation costs at most `limit` seconds."""
    costs, (low, high) = compiled.costs, compiled.range
    few, cost = len(costs) < ENOUGH, median(costs)
    message = f"compilation may cost {limit:g} s; in {counted(len(costs), 'cold launches')} it cost {cost:.3g} s"
    message += f" ({low:.3g} to {high:.3g})" if high > low else ""
    verdict = Verdict.PASS if high <= limit else Verdict.FAIL if low > limit and not few else Verdict.UNDECIDED
    if verdict is Verdict.UNDECIDED and few:
        message += f"; fewer than {ENOUGH} launches decide nothing so near, or beyond"
    hint = f"measure {ENOUGH} or more cold launches (cold={ENOUGH})" if few else _FASTER
    evidence = Evidence(where=WHERE, observed=cost, limit=limit, unit="s", hint=hint)
    return CHECK.judged(verdict, compiled.subject, message, len(costs), **evidence)


def _break_even(compiled: CompileCost, limit: float) -> Finding:
    """Compilation has paid after at most `limit` calls."""
    paid, launches = compiled.paid, len(compiled.costs)
    if paid is None:
        message = "after how many calls compilation has paid is not known: its steady state was not timed with eager"
        return CHECK.skip(compiled.subject, message, where=WHERE)
    verdict = Verdict.PASS if paid.high <= limit else Verdict.FAIL if paid.low > limit else Verdict.UNDECIDED
    if verdict is Verdict.FAIL and not paid.never and launches < ENOUGH:
        verdict = Verdict.UNDECIDED
    result = "it never has" if paid.never else f"{paid}" if paid.undecided else f"it has after {paid}"
    message = f"compilation must have paid after {limit:,g} calls; {result}: "
    message += f"it costs {paid.cost:.3g} s and a call saves {paid.saving:.3g} s"
    evidence = Evidence(where=WHERE, observed=paid.calls, limit=limit, unit="calls", hint=_FASTER)
    return CHECK.judged(verdict, compiled.subject, message, launches, **evidence)
