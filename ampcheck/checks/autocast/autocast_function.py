"""Requires: The Python backward of a torch.autograd.Function runs under the autocast state of its forward. Fails where
an op had mixed dtypes or 16 bits where its rule is float32; warns where it ran in float32 instead of 16 bits, unless
the backward casts by itself.

Measured: The states of a Function's forward are recorded with its context, with setup_context by its code. Ops that its
backward runs with autocast off are looked up in the policy: they count where the rule would have changed a dtype. A
Function that switched autocast off for a part of its forward does not count.

Causes: Backward runs outside the region. A plain Function does not restore autocast.

Fix: Decorate with torch.amp.custom_fwd and torch.amp.custom_bwd, or enter torch.autocast in backward.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.checks.autocast import clean, names, recast
from ampcheck.core.check import Check, first_findings
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import Kind
from ampcheck.records.autocast import GuardStats

CHECK = Check(
    "autocast-function",
    "autocast",
    __doc__,
    subjects=(Kind.TRAINING, Kind.CALL),
    needs=("GuardStats",),
    order=310,
    evidence=("docs/examples/checks/autocast-function",),
)


def check(stats: GuardStats, limits: Limits) -> Iterator[Finding]:
    """The Python backward of a Function runs under the state of its forward."""
    findings = []
    for call, _ in recast(stats, "function"):
        wide = {*call.dtypes} == {"float32"}  # which loses speed and no digits
        if call.casts and wide:
            continue
        message = (
            f"the backward of an autograd.Function must run under the autocast of its forward, but {call.op} ran on "
            f"{names(call.dtypes)} with autocast off; forward ran with {call.state}, under which the op computes in "
            f"{call.expected}"
        )
        if wide:
            message += ". In float32 nothing is unsafe, speed is lost"
        verdict, hint = Verdict.WARN if wide else Verdict.FAIL, CHECK.fix
        findings.append(CHECK.finding(verdict, stats.subject, message, where=call.where, hint=hint))
    yield from first_findings(findings, 3)
    if not findings:
        reason = "no autograd.Function whose forward ran under autocast had its Python backward run"
        yield clean(CHECK, stats, "Function ops", reason)
