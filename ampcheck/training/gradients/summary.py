"""Losses, weights and gradients of a loop that ran: their records, a chart and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ampcheck.core.limits import Limits
from ampcheck.core.run import Chart, Series, Table
from ampcheck.records.finite import FiniteStats
from ampcheck.records.gradients import GradientStats
from ampcheck.training.loop import TrainingLoop, plain_values

_POINTS = 400

_ROWS = 40


def nonfinite_parameters(loop: TrainingLoop) -> tuple[str, ...]:
    """The parameters with infinite or NaN elements, as they are now."""
    parameters = ((name, parameter) for name, parameter in loop.parameters() if parameter.device.type != "meta")
    return tuple(name for name, parameter in parameters if not bool(plain_values(parameter).isfinite().all()))


def measure_finite(loop: TrainingLoop, losses: Sequence[float], before: tuple[str, ...]) -> FiniteStats:
    """The losses and weights of a loop that ran; before: the parameters that were not finite at the start."""
    weights = sum(parameter.device.type != "meta" for _, parameter in loop.parameters())
    after = nonfinite_parameters(loop)
    return FiniteStats(loop.name, tuple(losses), before, after, weights, steps=len(losses))


def loss_chart(subject: str, losses: Sequence[float]) -> tuple[Chart, ...]:
    """The losses over the steps, at most 400 of them, where two or more are finite."""
    finite = [(float(number), loss) for number, loss in enumerate(losses) if math.isfinite(loss)]
    shown = finite[:: max(1, math.ceil(len(finite) / _POINTS))]
    if len(shown) < 2:
        return ()
    numbers, values = zip(*shown, strict=True)
    bad = len(losses) - len(finite)
    note = f"{bad:,} losses were not finite" if bad else ""
    series = (Series(subject, numbers, values),)
    return (Chart("line", f"Loss: {subject}", "step", "loss", series, check="gradient-underflow", note=note),)


def judged_step(stats: GradientStats, limits: Limits) -> GradientStats:
    """The gradients to judge: those of the last step where a parameter loses too much to the end, and not at first.

    A loss may begin with a weight of zero, or become smaller. What both of the last two steps lose is lost for good.
    """
    late = [step.lossy(limits) for step in stats.later]
    if len(late) < 2 or stats.skipped or stats.lossy(limits) or not late[0] & late[1]:
        return stats
    last = stats.later[-1]
    earlier = (attempt for attempt in stats.attempts if attempt[0] != last.scale)
    return replace(last, attempts=(*earlier, (last.scale, last.lost or 0.0, False)))


def gradient_table(stats: GradientStats) -> tuple[Table, ...]:
    """The gradients that lost most, at most 40; empty where none is known."""
    worst = sorted((loss for loss in stats.gradients if loss.known), key=lambda loss: -loss.faint)[:_ROWS]
    if not worst:
        return ()
    columns = ("gradient of", "dtype", "known", "zero here", "lost", "zero or subnormal", "norm lost")
    rows = [(o.name, o.dtype, o.known, o.zero, o.lost, o.faint, o.norm) for o in worst]
    note = f"step {stats.step}, loss scale {stats.scale:g}; known: nonzero in float64, and determined by the data"
    return (Table("gradients compared with float64", columns, rows, "gradient-underflow", note),)
