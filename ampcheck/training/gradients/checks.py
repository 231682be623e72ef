"""Losses, weights and gradients that become infinite, NaN or zero: the checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ampcheck.catalog.training import GRADIENT_UNDERFLOW
from ampcheck.core.check import Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Chart, Finding, Series, Table, Where
from ampcheck.core.text import at_scale, counted, listed
from ampcheck.records.finite import FiniteStats
from ampcheck.training.gradients.watch import GradientLoss, GradientStats
from ampcheck.training.loop import TrainingLoop, plain_values

_LISTED = 5
_POINTS = 400
_OFF = "torch.autocast(device, enabled=False)"

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
    return (Chart("line", f"Loss: {subject}", "step", "loss", series, check=GRADIENT_UNDERFLOW.slug, note=note),)


def check_gradients(stats: GradientStats, limits: Limits) -> list[Finding]:
    """`gradient-underflow`: what is nonzero in float64 stays nonzero, in every parameter.

    Fails for a parameter that loses more than `limits.underflow` of its elements, and where the gradients of all
    parameters together are off by more than that of their norm and a larger loss scale cures it. Warns of gradients
    that were only counted: what was flushed looks like what is zero.
    """
    if stats.skipped:
        return [GRADIENT_UNDERFLOW.incomplete(stats.subject, f"not judged: {stats.skipped}", hint=stats.hint)]
    known = [loss for loss in stats.gradients if loss.known]
    if not known:
        why = "no gradient is nonzero in float64" if stats.gradients else "no parameter was given a gradient"
        hint = (
            "start from weights and data of which the loss depends: every gradient is exactly zero in float64"
            if stats.gradients
            else "let the mapping name the model whose weights this loss reaches, and leave requires_grad on"
        )
        return [GRADIENT_UNDERFLOW.incomplete(stats.subject, f"not judged: {why} in step {stats.step}", hint=hint)]
    finite = [loss for loss in known if loss.nonfinite < loss.numel]
    if not finite:
        text = f"not judged: every gradient was infinite or NaN in step {stats.step}: see overflow and loss-scale"
        return [GRADIENT_UNDERFLOW.skip(stats.subject, text)]
    at = at_scale(stats.scale)
    weights = [loss for loss in known if loss.share > limits.underflow]
    damage = damage_text(stats, limits)
    if weights:
        worst, *rest = sorted(weights, key=lambda loss: -loss.lost)
        others = listed((f"{loss.name} {loss.lost:.1%}" for loss in rest), _LISTED - 1)
        more = f"; also {others}" if others else ""
        evidence = _evidence(stats, worst, worst.lost, limits)
        if stats.counted:
            message = f"gradients must not vanish; of that of {worst.name} {worst.lost:.1%} is zero{worst.marks}{more}"
            return [GRADIENT_UNDERFLOW.warn(stats.subject, f"{message} ({stats.counted})", **evidence)]
        message = (
            f"what is nonzero in float64 must not become zero; {worst.lost:.1%} of the gradient of {worst.name} did "
            f"({worst.zero:,} of {worst.known:,} elements, {worst.subnormal:,} more are subnormal) {at}{more}"
        )
        return [GRADIENT_UNDERFLOW.fail(stats.subject, message, **evidence)]
    if damage and stats.underflow is not None:
        message = f"what is nonzero in float64 must not vanish on the way to a parameter{damage}"
        evidence = _evidence(stats, None, stats.underflow.error, limits)
        evidence["unit"] = "share of the norm"
        return [GRADIENT_UNDERFLOW.fail(stats.subject, message, **evidence)]
    worst = max(finite, key=lambda loss: loss.share)
    text = f"of {counted(len(finite), 'gradients')} none lost more than {worst.share:.2%} of its elements {at}"
    text += f" in step {stats.step}"
    if stats.counted:
        text = f"of {counted(len(finite), 'gradients')} none shows the marks of flushing ({stats.counted})"
    if stats.later:
        text += f"; parameters were looked at up to step {stats.later[-1].step}"
    evidence = _evidence(stats, worst, worst.share, limits)
    evidence["hint"] = ""
    return [GRADIENT_UNDERFLOW.passed(stats.subject, text, len(finite), **evidence)]


def judged_step(stats: GradientStats, limits: Limits) -> GradientStats:
    """The gradients to judge: those of the last step where a parameter loses too much to the end, and not at first.

    A loss may begin with a weight of zero, or become smaller. What both of the last two steps lose is lost for good.
    """
    late = [_lossy(step, limits) for step in stats.later]
    if len(late) < 2 or stats.skipped or _lossy(stats, limits) or not late[0] & late[1]:
        return stats
    last = stats.later[-1]
    earlier = (attempt for attempt in stats.attempts if attempt[0] != last.scale)
    return replace(last, attempts=(*earlier, (last.scale, last.lost or 0.0, False)))


def _lossy(stats: GradientStats, limits: Limits) -> set[str]:
    """The parameters that lose more than `limits.underflow` of their elements."""
    return {loss.name for loss in stats.gradients if loss.known and loss.share > limits.underflow}


def damage_text(stats: GradientStats, limits: Limits) -> str:
    """What the underflow did to the gradients of all parameters together, to append to a message.

    Empty where they lose no more than `limits.underflow` of their norm.
    """
    lost = stats.underflow
    if lost is None or lost.error <= limits.underflow:
        return ""
    return (
        f"; the gradients of all parameters together are off by {lost.error:.1%} of their norm "
        f"{at_scale(stats.scale)}, and by {lost.cured:.2%} {at_scale(lost.scale)}: the rest vanished"
    )


def _evidence(stats: GradientStats, worst: GradientLoss | None, observed: float, limits: Limits) -> Evidence:
    where = replace(worst.where, module=worst.name.rpartition(".")[0]) if worst else Where("backward")
    hint = "see `loss-scale` for the scales that serve; if none does, keep this module in float32 or bfloat16"
    if stats.scale == 1.0:
        hint = "scale the loss (torch.amp.GradScaler), or use bfloat16; `loss-scale` reports which scales serve"
    if stats.counted:
        hint = f"{hint}; ampcheck.audit compares with a float64 backward"
    return Evidence(where=replace(where, step=stats.step), observed=observed, limit=limits.underflow, hint=hint)


def gradient_table(stats: GradientStats) -> Table | None:
    """The gradients that lost most, at most 40."""
    worst = sorted((loss for loss in stats.gradients if loss.known), key=lambda loss: -loss.faint)[:_ROWS]
    if not worst:
        return None
    columns = ("gradient of", "dtype", "known", "zero here", "lost", "zero or subnormal", "norm lost")
    rows = [(o.name, o.dtype, o.known, o.zero, o.lost, o.faint, o.norm) for o in worst]
    note = f"step {stats.step}, loss scale {stats.scale:g}; known: nonzero in float64, and determined by the data"
    return Table("gradients compared with float64", columns, rows, GRADIENT_UNDERFLOW.slug, note)
