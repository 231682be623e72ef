"""Requires: A custom op that gets floating tensors under autocast has an autocast kernel. Warns where it has none on
the device; fails where it then raised on mixed dtypes.

Measured: Every op outside of PyTorch's own namespaces that autocast would have acted on is recorded with the dtypes
that it got. Ops that are made of others are left out: those reach autocast themselves. Under a guard, every op without
a rule that raised on mixed dtypes counts, once it is shown to run when all inputs have one dtype.

Causes: An op of torch.library.custom_op or TORCH_LIBRARY without an autocast kernel: the op sees float16 from a linear
together with its own float32 parameter.

Fix: Register one, torch.library.register_autocast(op, device, dtype), or cast inside the op.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ampcheck.checks.autocast import clean, names, of_kind
from ampcheck.checks.policy import counted_modules, floats, passed
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import EVERY
from ampcheck.records.autocast import GuardStats
from ampcheck.records.policy import PolicyCalls, is_custom

CHECK = Check(
    "policy-unregistered",
    "policy",
    __doc__,
    unit="calls",
    subjects=EVERY,
    needs=("GuardStats", "PolicyCalls"),
    order=302,
    evidence=("docs/examples/checks/policy-unregistered",),
)


def _of_block(stats: GuardStats) -> Iterator[Finding]:
    found = False
    for call, count in (*of_kind(stats, "mixed"), *of_kind(stats, "bypass")):
        if not call.raised or call.rule:
            continue
        found = True
        message = (
            f"under autocast an op must get one dtype, but autocast has no rule for {call.op} on "
            f"{call.state.device}: it got {names(call.dtypes)} and raised: {call.raised}. With all inputs in "
            f"{call.runs_in} it runs"
        )
        hint = f"cast its inputs to {call.runs_in} at the call"
        if call.plain_op != call.op:
            hint = "cast what is written to the dtype of the tensor that it is written into"
        elif not call.op.startswith("aten::"):
            hint += ", or give the op a rule with torch.library.register_autocast"
        verdict = Verdict.WARN if call.caught else Verdict.FAIL
        yield CHECK.finding(verdict, stats.subject, message, where=call.where, observed=count, limit=0, hint=hint)
    if not found:
        yield clean(CHECK, stats, "autocast ops", "no op ran under autocast")


def _of_calls(calls: PolicyCalls) -> list[Finding]:
    findings = []
    for op in sorted({call.op for call in calls.unregistered}):
        of_op = [call for call in calls.unregistered if call.op == op]
        mixed = [call for call in of_op if len(floats(call.inputs)) > 1]
        dtypes = ", ".join(dict.fromkeys(call.inputs for call in of_op))
        message = f"a custom op should have an autocast kernel on {calls.device}; {op} has none: it is never cast and "
        message += f"got {dtypes} in {counted_modules(call.module for call in of_op)}"
        verdict = Verdict.WARN
        if calls.raised is not None and calls.raised.op == op:
            message += f"; it raised {calls.raised.message}"
            verdict = Verdict.FAIL if mixed else Verdict.WARN
        hint = f"register one: torch.library.register_autocast({op!r}, {calls.device!r}, dtype); or cast inside the op"
        findings.append(CHECK.finding(verdict, calls.name, message, where=(mixed or of_op)[0].where, hint=hint))
    custom = len({call.op for call in calls.calls if is_custom(call.op)})
    message = f"autocast casts the inputs of all {custom} custom ops" if custom else "no custom op ran under autocast"
    return findings or [passed(CHECK, calls, message, custom)]


def check(record: GuardStats | PolicyCalls, limits: Limits) -> Iterable[Finding]:
    """No custom op gets floating tensors, and none raises on mixed dtypes, because autocast has no rule for it."""
    return _of_block(record) if isinstance(record, GuardStats) else _of_calls(record)
