"""What the guards conclude about regions that do not act on the code that they are for. Pure: no PyTorch runs here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampcheck.autocast.guards.recasts import calls_of, names, recast
from ampcheck.autocast.guards.stats import GuardStats
from ampcheck.autocast.state import short
from ampcheck.catalog.autocast import AUTOCAST_SCOPE, AUTOCAST_STATE
from ampcheck.core.check import Check
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.text import counted


def lent(stats: GuardStats) -> Iterator[Finding]:
    """`autocast-state`: no region stays open while the generator or coroutine that entered it is suspended."""
    calls = calls_of(stats, "lent")
    for region in dict.fromkeys(call.region for call, _ in calls if call.region is not None):
        mine = [(call, count) for call, count in calls if call.region == region]
        call, lines = mine[0][0], len({call.where.place for call, _ in mine})
        others = f" (and at {counted(lines - 1, 'other lines')})" if lines > 1 else ""
        message = (
            f"a generator or coroutine must leave autocast as it found it where it is suspended, but the region that "
            f"it entered at {region.where.place} stays open: it cast {names(call.dtypes)} to "
            f"{short(call.state.dtype)} in code that runs meanwhile{others}"
        )
        hint = "leave the region before yield or await: compute in it, and yield the result after it"
        where = replace(call.where, op="")  # the cast, and not the op for which autocast makes it
        yield AUTOCAST_STATE.fail(stats.subject, message, where=where, observed=lines, limit=0, hint=hint)


def repaired(stats: GuardStats) -> Iterator[Finding]:
    """`autocast-state`: a region ends in the state that it set."""
    message = (
        "code inside a region must leave autocast as it found it, but {0.region.name} entered with autocast {0.state} "
        "and ended with autocast {0.now}: what ran in between did not run as the region says. The end of the region "
        "restored it"
    )
    hint = "nest `with torch.autocast(..., enabled=False)`, or restore the switch in a finally block"
    return _unkept(stats, "repaired", AUTOCAST_STATE, message, hint)


def decorates(stats: GuardStats) -> Iterator[Finding]:
    """`autocast-scope`: no region decorates a function whose code runs after its call returned."""
    message = (
        "a region must contain the code that it is for, but {0.region.name} is decorated with autocast {0.state}: the "
        "region ends when the call returns, and the code runs later, with autocast {0.now}"
    )
    hint = "enter torch.autocast inside the function, and leave it before each yield or await"
    return _unkept(stats, "decorates", AUTOCAST_SCOPE, message, hint)


def _unkept(stats: GuardStats, how: str, check: Check, message: str, hint: str) -> Iterator[Finding]:
    """message: a format of the record."""
    for unkept, count in stats.unkept.items():
        if unkept.how == how:
            where, text = unkept.region.where, message.format(unkept)
            yield check.fail(stats.subject, text, where=where, observed=count, limit=0, hint=hint)


def idle(stats: GuardStats) -> Iterator[Finding]:
    """`autocast-scope`: a region is for the device of the ops in it."""
    calls = [(call, dtype) for call, _, dtype in recast(stats, "idle")]
    for region in dict.fromkeys(call.region for call, _ in calls if call.region is not None):
        (call, dtype), *more = ((call, dtype) for call, dtype in calls if call.region == region)
        others = f" and {counted(len(more), 'other calls')}" if more else ""
        why = f"no op ran on {region.device}" if region.available else f"this machine has no {region.device}"
        message = (
            f"a region must be for the device of its ops, but {region.name} cast nothing, since {why}: {call.op} at "
            f"{call.where.place}{others} ran on {call.state.device} in {names(call.dtypes)}, which autocast on "
            f"{call.state.device} computes in {short(dtype)}"
        )
        hint = "pass the device of the inputs: torch.autocast(x.device.type, ...)"
        verdict = Verdict.WARN
        if not region.available:
            verdict, hint = Verdict.INCOMPLETE, f"{hint}; or run this under ampcheck.emulate({region.device!r})"
        yield AUTOCAST_SCOPE.finding(verdict, stats.subject, message, where=region.where, hint=hint)
