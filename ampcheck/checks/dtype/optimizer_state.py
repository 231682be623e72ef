"""Requires: Optimizer state has the dtypes that the declared policy allows; a step counter may always be float32.
Whatever is declared, state that updates are divided by does not become zero: fails where it does and the updates
there are too large, by more than half of the norm of all updates.

Measured: Every floating-point tensor in optimizer.state, also in lists and mappings, is listed by the parameter it
belongs to. In the first steps, elements of 16-bit state that are zero and not zero in float64 are compared with the
updates of the same elements: what vanished in a denominator makes them more than twice as large as in float64. Without
a policy other 16-bit state is reported and not judged: stagnation says what it loses, now and later.

Causes: Optimizers create their state in the dtype of the parameters, so that a cast model has 16-bit moments: squared
gradients below 6e-8 are zero in float16. A state that was cast by hand, or loaded from a 16-bit checkpoint.

Fix: Create the optimizer on float32 parameters, or use one that keeps its state in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampcheck.checks.dtype import LISTED, judged, of_roles
from ampcheck.core.check import Check
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.subject import Kind
from ampcheck.core.text import listed
from ampcheck.records.state import Role, StateDtypeStats, VanishedState, excess_of

CHECK = Check(
    "optimizer-state",
    "dtype",
    __doc__,
    subjects=(Kind.TRAINING, Kind.CALL),
    needs=("StateDtypeStats",),
    order=230,
    evidence=("nanogpt: eps too small for float16",),
)

_EXCESS = 0.5
"""The norm by which updates may be too large where state vanished, relative to that of all exact updates."""


def check(stats: StateDtypeStats, limits: Limits) -> list[Finding]:
    """Optimizer state has the dtypes of the policy, and none that updates are divided by becomes zero."""
    states = of_roles(stats, Role.STATE)
    if not states:
        why = "the optimizers keep no floating-point state" if stats.after_step else "no step has made any state yet"
        return [CHECK.absent(stats.subject, why)]
    vanished = stats.vanished
    if excess_of(vanished) <= _EXCESS:
        return judged(stats, CHECK, "state", states)
    misfits = judged(stats, CHECK, "state", states) if stats.policy is not None else []
    return [_vanished(stats, vanished), *(finding for finding in misfits if finding.verdict is not Verdict.PASS)]


def _vanished(stats: StateDtypeStats, vanished: Sequence[VanishedState]) -> Finding:
    ranked = sorted(vanished, key=lambda state: -state.excess)
    worst = ranked[0]
    names = listed((state.name for state in ranked), LISTED)
    size = f"up to {worst.largest:.2g} times too large" if math.isfinite(worst.largest) else "infinite or NaN"
    becomes = "become " if worst.foreseen else "were "
    message = (
        f"optimizer state that an update is divided by must not become zero, but of {names} in {worst.dtype} "
        f"{100 * worst.zero / worst.elements:.3g} % of the elements did in step {worst.step}, and are not zero in "
        f"float64: their updates {becomes}{size}"
    )
    hint = (
        f"keep the state in float32: let the optimizer step float32 parameters. {worst.dtype} holds nothing below "
        f"{format_of(worst.dtype).smallest_subnormal:.2g}, and a mean of squared gradients is soon smaller; bfloat16 "
        "keeps the range, though few digits"
    )
    where = Where("update", module=worst.name, step=worst.step)
    share = worst.zero / worst.elements
    return CHECK.fail(stats.subject, message, where=where, observed=share, limit=0.0, unit="share", hint=hint)
