"""Is the loss that a step returns finite, where float64 says that it is?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.numerics.ops import OpWatch
from ampcheck.torchtools.trace import Trace
from ampcheck.training.distributed.ranks import gather
from ampcheck.training.float64_mode import shadowed
from ampcheck.training.gradients.nonfinite import mend_nonfinite
from ampcheck.training.gradients.underflow import quiet
from ampcheck.training.loop import Snapshot, StepError, TrainingLoop


@dataclass(frozen=True, slots=True)
class LossStats:
    """The first step that did not return a finite loss, beside float64.

    step: None where every step did. value: what it returned. exact: what the same step returns in float64, not finite
    where that is nothing to compare with. many: how many of the observed steps returned such a loss. place: the op in
    which a value first became infinite or NaN.
    """

    subject: str
    step: int | None = None
    value: float = 0.0
    exact: float = math.nan
    many: int = 0
    steps: int = 0
    place: Where | None = None


def measure_loss(loop: TrainingLoop, start: Snapshot, losses: Sequence[float]) -> LossStats:
    """Run the first step with a loss that is not finite again, as it is and in float64.

    losses: what the steps returned, from 0 on. start: the state before step 0. Use it inside `loop.preserved()`. A step
    that returns a finite loss when it is run again (it draws on an iterator) is not judged.
    """
    here = next((number for number, loss in enumerate(losses) if not math.isfinite(loss)), None)
    step = min((one for one in gather(here) if one is not None), default=None)  # all ranks take the same steps
    if step is None:
        return LossStats(loop.name, steps=len(losses))
    start.restore()
    watch = OpWatch(shadow=False)
    with quiet():
        for number in range(step):
            loop.take(number)
        before = loop.snapshot()
        with Trace(next(iter(loop.reached.modules.values()), None), observers=(watch,)):
            again = loop.take(step)
        before.restore()
        with shadowed(loop, torch.float64):
            exact = loop.take(step)
    if step != here:  # it is the loss of another rank
        return LossStats(loop.name, steps=len(losses))
    repeats = not isinstance(again, StepError) and not math.isfinite(again)
    return LossStats(
        loop.name,
        step,
        losses[step],
        math.nan if isinstance(exact, StepError) or not repeats else exact,
        sum(not math.isfinite(loss) for loss in losses),
        len(losses),
        next((fact.where for fact in watch.facts() if fact.produced), None),
    )


def check_loss(stats: LossStats) -> list[Finding]:
    """`loss-dtype`: a loss that is finite in float64 is finite. Empty where there is nothing to say."""
    if stats.step is None or not math.isfinite(stats.exact):
        return []
    first = f"; the first value that is not finite comes from {stats.place}" if stats.place else ""
    message = (
        f"a loss must be finite where float64 gives a finite one; step {stats.step} returned {stats.value:g}, and "
        f"{stats.exact:.6g} in float64 ({stats.many} of {stats.steps} steps returned no finite loss){first}"
    )
    place = stats.place or Where()
    hint = mend_nonfinite(place)
    where = replace(place, phase=place.phase or "forward", step=stats.step)
    return [Finding("loss-dtype", Verdict.FAIL, stats.subject, message, where, stats.value, stats.exact, hint=hint)]
