"""Requires: No op is called that autocast bans on the device. Fails where its exception ended the run; warns where the
model caught it.

Measured: The model runs under the device's policy, which raises PyTorch's own message. A loop or a callable under the
CPU's autocast fails where it calls an op that CUDA bans, by the policy snapshot of the release.

Causes: A sigmoid followed by binary_cross_entropy or BCELoss: CUDA and XPU ban it, the CPU computes it in float32.

Fix: Use binary_cross_entropy_with_logits (BCEWithLogitsLoss); else leave autocast around it, with float32 inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ampcheck.checks.autocast import clean
from ampcheck.checks.policy import counted_modules, passed
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.subject import EVERY
from ampcheck.core.text import counted
from ampcheck.records.autocast import GuardStats
from ampcheck.records.policy import BANNED, PolicyCalls

CHECK = Check(
    "policy-banned",
    "policy",
    __doc__,
    subjects=EVERY,
    needs=("GuardStats", "PolicyCalls"),
    order=303,
    evidence=("docs/examples/checks/policy-banned",),
)


def _of_block(stats: GuardStats) -> Iterator[Finding]:
    raised = stats.raised
    for op, by in stats.banned.items():
        first, *others = (line.strip() for line in raised.message.splitlines() if line.strip()) if raised else [""]
        where = replace(raised.where if raised else Where(), phase="forward", op=op)
        message = (
            f"an op that autocast bans must not run under it, but {op}, which {' and '.join(by)} bans, was called: "
            f"{first}"
        )
        yield CHECK.fail(stats.subject, message, where=where, hint=" ".join(others))
    for where in () if stats.banned else stats.banned_on_cuda:
        message = (
            f"an op that autocast bans must not run under it; {where.op} computes in float32 under the CPU's autocast, "
            "and raises under that of CUDA"
        )
        yield CHECK.fail(stats.subject, message, where=where, hint=CHECK.fix)
    if not stats.banned and not stats.banned_on_cuda:
        message = "{} ran and no ban ended the block; a ban that the block catches is not seen"
        yield clean(CHECK, stats, "autocast ops", "no op ran under autocast", message)


def _of_calls(calls: PolicyCalls) -> list[Finding]:
    findings = []
    banned = {call.op: call for call in reversed(calls.calls) if call.rule == BANNED}
    for op, call in sorted(banned.items()):
        text = " ".join(calls.policy.ops[op].raises.split())
        first, _, rest = text.partition(". ")
        raised = calls.raised is not None and calls.raised.op == op
        verdict, what = (Verdict.FAIL, "raises") if raised else (Verdict.WARN, "raised, which the model caught")
        modules = counted_modules(call.module for call in calls.calls if call.op == op)
        message = f"no op may be called that autocast bans on {calls.device}; {op} {what}: {first or text} ({modules})"
        hint = rest or "leave autocast around it: torch.autocast(..., enabled=False), with float32 inputs"
        findings.append(CHECK.finding(verdict, calls.name, message, where=call.where, hint=hint))
    ops = len({call.op for call in calls.ruled})
    return findings or [passed(CHECK, calls, f"none of {counted(ops, 'ops')} is banned", ops)]


def check(record: GuardStats | PolicyCalls, limits: Limits) -> Iterable[Finding]:
    """No op is called that autocast bans on the device. Errors that a block catches are not seen."""
    return _of_block(record) if isinstance(record, GuardStats) else _of_calls(record)
