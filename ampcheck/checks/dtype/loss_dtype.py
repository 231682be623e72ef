"""Requires: The loss is computed in float32 and is finite. Warns when the loss, or a reduction inside it, is computed
in 16 bits; fails when a declared policy of the training loop requires float32, or when the loss is not finite while
the float64 loss is.

Measured: The dtype of the loss, when the subject declares one or its output is 0-d; in a training loop the dtype of
each tensor on which backward is called, and of the sums and means that lead to it.

Causes: A loss computed from 16-bit outputs outside autocast, or under an autocast policy without a rule for it; a mean
or sum over many elements in 16 bits.

Fix: Compute the loss in float32: output.float() before it, or the loss function under autocast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ampcheck.checks.range import Judges, first_op, left_out, mend_nonfinite, passed
from ampcheck.core.check import Check
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.subject import EVERY
from ampcheck.records.numerics import NumericsStats
from ampcheck.records.state import StateDtypeStats

CHECK = Check(
    "loss-dtype",
    "dtype",
    __doc__,
    subjects=EVERY,
    needs=("NumericsStats", "StateDtypeStats"),
    order=200,
    evidence=("tests/corpus/charbonnier_root_of_zero", "tests/corpus/count_overflows"),
)


def _of_loop(stats: StateDtypeStats, limits: Limits) -> list[Finding]:
    return nonfinite(stats.subject, stats.returned, stats.exact, stats.place) or [_started(stats)]


def nonfinite(subject: str, losses: Sequence[float], exact: Mapping[int, float], place: Where | None) -> list[Finding]:
    """`loss-dtype`: a loss that is finite in float64 is finite. Empty where the first that is not has no such value.

    losses, exact: what the steps returned, and would have returned. place: the op of that step in which a value first
    became infinite or NaN.
    """
    step = next((number for number, loss in enumerate(losses) if not math.isfinite(loss)), -1)
    if not math.isfinite(reference := exact.get(step, math.nan)):
        return []
    many = sum(not math.isfinite(loss) for loss in losses)
    message = (
        f"a loss must be finite where float64 gives a finite one; step {step} returned {losses[step]:g}, and "
        f"{reference:.6g} in float64 ({many} of {len(losses)} steps returned no finite loss){first_op(place)}"
    )
    place = place or Where()
    where, hint = replace(place, phase=place.phase or "forward", step=step), mend_nonfinite(place)
    return [CHECK.fail(subject, message, where=where, observed=losses[step], limit=reference, hint=hint)]


def _started(stats: StateDtypeStats) -> Finding:
    """Return what backward passes start from."""
    dtypes, computed = stats.losses, stats.computed
    seen = tuple(dict.fromkeys(dtypes))
    if not seen:
        return CHECK.absent(stats.subject, "no backward pass from a loss was seen")
    declared = stats.policy.allowed("loss", "loss") if stats.policy is not None else ()
    allowed = declared or ("float32", "float64")
    bad = [dtype for dtype in seen if dtype not in allowed]
    narrow = [dtype for dtype in computed if dtype not in allowed]
    if not bad and not narrow:
        text = f"backward starts from a loss in {', '.join(seen)}, and no reduction of it was computed in 16 bits"
        return CHECK.passed(stats.subject, text, len(dtypes))
    required = f"{' or '.join(declared)}, by {stats.policy}" if declared else "float32"
    message = (
        f"backward must start from a loss in {required}; it starts from one in {', '.join(bad)}"
        if bad
        else f"a loss must be computed in {required}; backward starts from one in {', '.join(seen)}, but it or a part "
        f"of it was computed in {', '.join(narrow)} and cast afterwards, which brings no digit back"
    )
    hint = "compute the loss in float32 (logits.float() before it, or the loss under autocast)"
    verdict = Verdict.FAIL if declared and bad else Verdict.WARN
    return CHECK.finding(verdict, stats.subject, message, where=stats.loss_at, hint=hint)


def _of_run(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """A loss of 16 bits has two or three digits: a warning."""
    if skipped := left_out(stats, CHECK):
        return skipped
    if not stats.losses:
        return [CHECK.absent(stats.name, "the subject gives no loss of its own")]
    low = [dtype for dtype in stats.losses if format_of(dtype).bits <= 16]
    if not low:
        return [passed(stats, CHECK, f"the loss is {stats.losses[0]}", len(stats.losses))]
    digits = -math.log10(format_of(low[0]).unit_roundoff)
    message = f"a loss must be computed in float32; it or a part of it is {low[0]}, with {digits:.1f} decimal digits"
    hint = "compute the loss from output.float(), or under torch.autocast(enabled=False)"
    return [CHECK.warn(stats.name, message, where=Where(phase="forward"), hint=hint)]


_JUDGES: Judges = {NumericsStats: _of_run, StateDtypeStats: _of_loop}


def check(stats: NumericsStats | StateDtypeStats, limits: Limits) -> list[Finding]:
    """The loss is computed in float32, and is finite where float64's is."""
    return _JUDGES[type(stats)](stats, limits)
