"""Requires: The gradients that an optimizer sees, and what the step returns, do not depend on the loss scale.

Measured: Each value of the run has a degree in the scale: a scaled loss and its gradients 1, a gradient over its norm
0, a sum of both none. The scale after an update is another one than before. What an optimizer steps, what a step
returns and what the code itself writes into a weight must have the degree 0. Code may read the scale, multiply by it,
and compare it with that of before. Where it reads another number or takes a decision that depends on the scale, the
check is incomplete and names the line: what the code does at another scale was not seen.

Causes: Clipping before unscale_, a gradient penalty on scaled gradients, one of several losses not scaled, an update
between two optimizers, a logged loss that is divided by the scale after the update.

Fix: Unscale gradients before they are read; scale every loss; return the loss from before it was scaled.
"""

from __future__ import annotations

from ampcheck.core.check import Check, Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.subject import Kind
from ampcheck.records.invariance import RETURNED, Dependence, InvarianceStats

CHECK = Check(
    "scale-invariance",
    "training",
    __doc__,
    subjects=(Kind.TRAINING, Kind.CALL),
    needs=("InvarianceStats",),
    order=604,
    evidence=("tests/corpus/training/penalty_added_after_scaling", "nanogpt: clip before unscale"),
)

_CALLS = (
    "unscale (scaler.unscale_) before gradients are clipped or read; scale every loss of the step; call update once, "
    "after all optimizers"
)
_PENALTY = (
    "unscale what torch.autograd.grad gives of a scaled loss ({}) before a penalty is made of it: grad / "
    "scaler.get_scale(); and scale the sum of loss and penalty"
)
_RETURN = "return the loss before it is scaled, or keep scaler.get_scale() from before scaler.update()"


def check(stats: InvarianceStats, limits: Limits) -> list[Finding]:
    """Gradients and what a step returns are the same at every loss scale."""
    if stats.skipped:
        verdict, message = Verdict.INCOMPLETE if stats.hint else Verdict.SKIP, f"not judged: {stats.skipped}"
        where = Where(file=stats.place[0], line=stats.place[1])
        return [CHECK.finding(verdict, stats.subject, message, where=where, hint=stats.hint)]
    if stats.found:
        return [_depends(stats, found) for found in stats.found]
    text = f"each of {stats.gradients} gradients of optimizers is the same at every loss scale"
    return [CHECK.passed(stats.subject, text, stats.gradients)]


def _depends(stats: InvarianceStats, found: Dependence) -> Finding:
    power = found.powers[0] if len(found.powers) == 1 else None
    how = "is a sum of parts that depend on it in different ways"
    if power is not None:
        how = "is multiplied by the scale" if power > 0 else "is divided by the scale"
        how += "" if abs(power) == 1 else f" to the power of {abs(power):g}"
    elif found.powers:
        how = "depends on two scales: of two scalers, or from before and after scaler.update()"
    message = f"training must be the same at every loss scale; {found.what} {how}"
    file, line = found.place
    where = Where("update", found.name.rpartition(".")[0], file=file, line=line, step=found.step)
    kind, hint = "", _CALLS
    if found.what == RETURNED:
        kind, hint = "returned", _RETURN
    elif stats.penalty:
        kind, hint = "penalty", _PENALTY.format(stats.penalty)
    shown = Evidence(where=where, observed=power, limit=0.0, unit="power of the scale", hint=hint, kind=kind)
    return CHECK.fail(stats.subject, message, **shown)
