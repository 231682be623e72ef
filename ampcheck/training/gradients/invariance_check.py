"""The findings of `scale-invariance`."""

from __future__ import annotations

import math

from ampcheck.catalog.causes import RETURNED
from ampcheck.catalog.training import SCALE_INVARIANCE
from ampcheck.core.check import Evidence
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.training.gradients.invariance import InvarianceStats


def check_invariance(stats: InvarianceStats) -> list[Finding]:
    """`scale-invariance`: gradients that the optimizer sees, what the step returns, and what optimizers and schedulers
    go by do not depend on the scale. Warns of numbers that the code keeps and that do."""
    if stats.skipped:
        verdict = Verdict.INCOMPLETE if stats.hint else Verdict.SKIP
        return [SCALE_INVARIANCE.finding(verdict, stats.subject, f"not judged: {stats.skipped}", hint=stats.hint)]
    findings: list[Finding] = []
    for difference in stats.differences:
        what = RETURNED
        hint = "return the loss before it is scaled, or keep scaler.get_scale() from before scaler.update()"
        if difference.what == "gradient":
            what = f"the gradient of {difference.name} that the optimizer sees"
            hint = (
                "unscale (scaler.unscale_) before gradients are clipped or read; scale every loss of the step; "
                "call update once, after all optimizers"
            )
            if stats.penalties:
                place = stats.penalties[0]
                hint = (
                    f"unscale what torch.autograd.grad gives of a scaled loss ({place.file}:{place.line}) before a "
                    "penalty is made of it: grad / scaler.get_scale(); and scale the sum of loss and penalty"
                )
        elif difference.what == "state":
            what = f"{difference.name}, which the optimizer goes by,"
            hint = "give a scheduler the loss before it is scaled"
        elif difference.what == "kept":
            what = f"the number {difference.name} that the code keeps"
            hint = "unscale (scaler.unscale_) before norms of gradients are taken; keep the loss before it is scaled"
        first, second = difference.runs
        how = f"is {difference.ratio:.4g} times as large with {second} as with {first}"
        if math.isinf(difference.ratio):
            how = f"is 0 with {first}, and not with {second}"
        if math.isnan(difference.ratio):
            how = f"is missing, infinite or NaN with one of {first} and {second}, and not with the other"
        step = f"(exact values, step {difference.step})"
        message = f"the same steps must give the same at every loss scale; {what} {how} {step}"
        module = difference.name.rpartition(".")[0] if difference.what == "gradient" else ""
        where = Where("update", module, step=difference.step)
        shown = Evidence(where=where, observed=difference.error, limit=difference.limit, unit="relative", hint=hint)
        verdict = Verdict.WARN if difference.what == "kept" else Verdict.FAIL  # it may be meant to
        findings.append(SCALE_INVARIANCE.finding(verdict, stats.subject, message, **shown))
    if findings:
        return findings
    text = f"{stats.gradients} gradients and {stats.values} values are equal with {', with '.join(stats.runs)}"
    return [SCALE_INVARIANCE.passed(stats.subject, text, stats.gradients + stats.values)]
