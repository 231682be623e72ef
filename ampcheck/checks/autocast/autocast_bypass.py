"""Requires: No in-place or out= variant is called where autocast would have cast for the plain op. Fails when it raises
or writes another dtype than the rule gives; warns when it ran in float32 where it could have run in 16 bits.

Measured: Mutating overloads that run with autocast on are matched by their schema to the plain overload, whose rule on
that device says what would have been cast. Those of optimizers and of PyTorch's own library do not count.

Causes: Calls of addmm_, baddbmm_, exp_, torch.mm(..., out=...): autocast has kernels for plain ops only.

Fix: Call the plain op and assign its result.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.checks.autocast import clean, names, recast
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import Kind
from ampcheck.records.autocast import GuardStats

CHECK = Check(
    "autocast-bypass",
    "autocast",
    __doc__,
    unit="calls",
    subjects=(Kind.TRAINING, Kind.CALL),
    needs=("GuardStats",),
    order=307,
    evidence=("docs/examples/checks/autocast-bypass", "reports/found/torch-adaptive-log-softmax"),
)


def check(stats: GuardStats, limits: Limits) -> Iterator[Finding]:
    """No in-place or out= variant where autocast would have cast for the plain op."""
    found = False
    for call, count in recast(stats, "bypass"):
        if not call.raised and call.result == call.expected:
            continue
        found = True
        message = (
            f"under autocast to {call.state.dtype} an op follows its rule, but {call.op} does not go through "
            f"autocast ({names(call.dtypes)}); {call.plain_op} would have computed in {call.expected}. "
        )
        verdict = Verdict.FAIL
        if call.raised:
            verdict, message = (Verdict.WARN if call.caught else Verdict.FAIL), f"{message}It raised: {call.raised}"
        elif call.result == "float32":
            verdict, message = Verdict.WARN, f"{message}It ran in float32: nothing is unsafe, speed is lost"
        else:
            message += f"It wrote {call.result}"
        hint = f"call {call.plain_op.removeprefix('aten::').partition('.')[0]} and assign its result"
        yield CHECK.finding(verdict, stats.subject, message, where=call.where, observed=count, limit=0, hint=hint)
    if not found:
        yield clean(CHECK, stats, "autocast ops", "no op ran under autocast")
