"""Do losses and weights stay finite while a loop runs as it is?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from ampcheck.core.run import Finding, Verdict, Where, passed
from ampcheck.training.gradients.capture import plain_values
from ampcheck.training.gradients.nonfinite import mend_nonfinite
from ampcheck.training.loop import TrainingLoop

LAST = 3
"""So many steps at the end with a loss that is not finite are no passing overflow any more."""

_LISTED = 3


@dataclass(frozen=True, slots=True)
class FiniteStats:
    """losses: what the steps returned, from 0 on. before, after: parameters with infinite or NaN elements, by name, at
    the start and after the last step. weights: how many parameters were looked at. place: the op in which step
    `overflowed` first makes an infinity or a NaN; None where that is not known.
    """

    subject: str
    losses: tuple[float, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    weights: int = 0
    place: Where | None = None

    @property
    def trailing(self) -> int:
        """How many losses at the end are infinite or NaN."""
        return sum(1 for _ in takewhile(lambda loss: not math.isfinite(loss), reversed(self.losses)))

    @property
    def overflowed(self) -> int | None:
        """The first step from which on no loss is finite; None where that is a passing overflow or there is none."""
        lost = self.trailing
        return len(self.losses) - lost if lost and (lost >= LAST or lost == len(self.losses)) else None


def nonfinite_parameters(loop: TrainingLoop) -> tuple[str, ...]:
    """The parameters with infinite or NaN elements, as they are now."""
    held = ((name, parameter) for name, parameter in loop.parameters() if parameter.device.type != "meta")
    return tuple(name for name, parameter in held if not bool(plain_values(parameter).isfinite().all()))


def measure_finite(loop: TrainingLoop, losses: Sequence[float], before: tuple[str, ...]) -> FiniteStats:
    """What a loop came to; before: the parameters that were not finite at the start."""
    weights = sum(parameter.device.type != "meta" for _, parameter in loop.parameters())
    return FiniteStats(loop.name, tuple(losses), before, nonfinite_parameters(loop), weights)


def check_finite(stats: FiniteStats) -> list[Finding]:
    """`nonfinite-gradient`: weights stay finite. `overflow`: so does the loss, a passing overflow aside."""
    found: list[Finding] = []
    if names := stats.after:
        many = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        when = (
            f"{', '.join(stats.before[:_LISTED])} before the first step"
            if stats.before
            else f"they became so within {len(stats.losses)} steps"
        )
        message = f"weights must stay finite; {', '.join(names[:_LISTED])}{many} have infinite or NaN elements: {when}"
        hint = (
            "start from finite weights: nothing can be learned from these"
            if stats.before
            else "a gradient was infinite or NaN, or the update divided by zero (an eps below the format): step "
            "through a GradScaler, keep weights and optimizer state in float32; see stagnation and overflow"
        )
        where = Where("update", names[0].rpartition(".")[0])
        slug = "nonfinite-gradient"
        found.append(
            Finding(slug, Verdict.FAIL, stats.subject, message, where, float(len(names)), 0.0, "tensors", hint)
        )
    lost, first, place = stats.trailing, stats.overflowed, stats.place
    if first is not None:
        message = (
            f"what a step returns must be finite; from step {first} on each of {lost} steps returned {stats.losses[-1]}"
        )
        message += f"; the first value that is not finite comes from {place}" if place else ""
        hint = (
            mend_nonfinite(place)
            if place
            else "nothing is learned from such a loss; look for the first op with the audit of the model in forward"
        )
        where = replace(place or Where("forward"), step=first)
        found.append(Finding("overflow", Verdict.FAIL, stats.subject, message, where, float(lost), 0.0, "steps", hint))
    if stats.losses and not lost:
        text = f"the last of {len(stats.losses)} losses is finite"
        found.append(passed("overflow", stats.subject, text, len(stats.losses)))
    if stats.losses and not stats.after:
        text = f"all weights are finite after {len(stats.losses)} steps"
        found.append(passed("nonfinite-gradient", stats.subject, text, stats.weights))
    return found
