"""Losses, weights and gradients that become infinite, NaN or zero: the checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from ampcheck.catalog.numerics import LOSS_DTYPE, NONFINITE_GRADIENT, NONFINITE_REFERENCE, OVERFLOW
from ampcheck.catalog.training import GRADIENT_UNDERFLOW
from ampcheck.core.check import Evidence
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Chart, Finding, Series, Table, Where
from ampcheck.core.text import at_scale, counted, listed
from ampcheck.numerics.findings import is_cast, mend_cast
from ampcheck.training.gradients.watch import GradientLoss, GradientStats
from ampcheck.training.loop import TrainingLoop, plain_values

LAST = 3
"""So many steps at the end with a loss that is not finite are no passing overflow any more."""

_LISTED = 5
_POINTS = 400
_OFF = "torch.autocast(device, enabled=False)"

_ROWS = 40


@dataclass(frozen=True, slots=True)
class FiniteStats:
    """losses: what the steps returned, from 0 on. before, after: parameters with infinite or NaN elements, by name, at
    the start and after the last step. weights: how many parameters were looked at. place: the op in which step
    `overflowed` first makes an infinity or a NaN; None where that is not known. undefined: the step in which
    float64 makes one there as well. guards: options of the optimizers
    (`eps=1e-08 of the optimizer`) that are zero in the format of their parameters, with that format.
    """

    subject: str
    losses: tuple[float, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    weights: int = 0
    place: Where | None = None
    undefined: int | None = None
    guards: tuple[str, ...] = ()

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
    parameters = ((name, parameter) for name, parameter in loop.parameters() if parameter.device.type != "meta")
    return tuple(name for name, parameter in parameters if not bool(plain_values(parameter).isfinite().all()))


def measure_finite(loop: TrainingLoop, losses: Sequence[float], before: tuple[str, ...]) -> FiniteStats:
    """The losses and weights of a loop that ran; before: the parameters that were not finite at the start."""
    weights = sum(parameter.device.type != "meta" for _, parameter in loop.parameters())
    after = nonfinite_parameters(loop)
    guards = vanished_guards(loop) if after and not before else ()
    return FiniteStats(loop.name, tuple(losses), before, after, weights, guards=guards)


def vanished_guards(loop: TrainingLoop) -> tuple[str, ...]:
    """The options called eps that are zero in the dtype of the parameters that they guard, as text."""
    texts = []
    for group in (group for optimizer in loop.optimizers.values() for group in optimizer.param_groups):
        floating = (parameter.dtype for parameter in group["params"] if parameter.is_floating_point())
        for dtype in dict.fromkeys(dtype for dtype in floating if dtype.itemsize <= 2):
            for name, value in group.items():
                number = isinstance(value, float) and name.startswith("eps")
                if number and 0.0 < value <= format_of(dtype).flushes_at:
                    texts.append(f"{name}={value:g}, which is zero in {str(dtype).removeprefix('torch.')}")
    return tuple(dict.fromkeys(texts))


def check_finite(stats: FiniteStats) -> list[Finding]:
    """`nonfinite-gradient`: weights stay finite. `overflow`: so does the loss, a passing overflow aside; where no
    precision mends it, `nonfinite-reference`."""
    findings: list[Finding] = []
    if names := stats.after:
        when = (
            f"{', '.join(stats.before[:_LISTED])} before the first step"
            if stats.before
            else f"they became so within {len(stats.losses)} steps"
        )
        message = f"weights must stay finite; {listed(names, _LISTED)} have infinite or NaN elements: {when}"
        hint = (
            "start from finite weights: nothing can be learned from these"
            if stats.before
            else "a gradient was infinite or NaN, or the update divided by zero (an eps below the format): step "
            "through a GradScaler, keep weights and optimizer state in float32; see stagnation and overflow"
        )
        if stats.guards:
            hint = (
                f"the optimizer guards a division by {listed(stats.guards, _LISTED)}: keep weights and optimizer state "
                "in float32, where it does, or use an eps that the format holds (1e-4 in float16)"
            )
        where = Where("update", names[0].rpartition(".")[0])
        shown = Evidence(where=where, observed=len(names), limit=0.0, unit="tensors", hint=hint)
        findings.append(NONFINITE_GRADIENT.fail(stats.subject, message, **shown))
    lost, first, place = stats.trailing, stats.overflowed, stats.place
    if first is not None:
        message = (
            f"what a step returns must be finite; from step {first} on each of {lost} steps returned {stats.losses[-1]}"
            f"{_first_op(place)}"
        )
        hint = "nothing is learned from such a loss; look for the first op with the audit of the model in forward"
        hint = mend_nonfinite(place) if place else hint
        if stats.undefined is not None:
            message, hint = f"{message}, which has no finite result in float64 either", NONFINITE_REFERENCE.fix
        where = replace(place or Where("forward"), step=first if stats.undefined is None else stats.undefined)
        shown = Evidence(where=where, observed=lost, limit=0.0, unit="steps", hint=hint)
        check = OVERFLOW if stats.undefined is None else NONFINITE_REFERENCE
        findings.append(check.fail(stats.subject, message, **shown))
    if stats.losses and not lost:
        text = f"the last of {len(stats.losses)} losses is finite"
        findings.append(OVERFLOW.passed(stats.subject, text, len(stats.losses)))
    if stats.losses and not stats.after:
        text = f"all weights are finite after {len(stats.losses)} steps"
        findings.append(NONFINITE_GRADIENT.passed(stats.subject, text, stats.weights))
    return findings


def _first_op(place: Where | None) -> str:
    return f"; the first value that is not finite comes from {place}" if place else ""


def mend_nonfinite(place: Where) -> str:
    """The hint for an op that makes infinities or NaNs of finite values, by what sort of op it is and where it runs."""
    here = f"module {place.module}" if place.module else f"{place.file}:{place.line}" if place.file else "that op"
    if is_cast(place):
        return mend_cast(place, "the narrow format (65504 in float16)")
    if place.module or place.phase == "backward":
        return f"keep {here} in float32 (with {_OFF}, on float32 inputs), or make what {place.op} is given smaller"
    return "compute and sum the loss in float32 (output.float() before it), or take a mean instead of a sum"


def check_loss(subject: str, losses: Sequence[float], exact: Mapping[int, float], place: Where | None) -> list[Finding]:
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
        f"{reference:.6g} in float64 ({many} of {len(losses)} steps returned no finite loss){_first_op(place)}"
    )
    place = place or Where()
    where, hint = replace(place, phase=place.phase or "forward", step=step), mend_nonfinite(place)
    return [LOSS_DTYPE.fail(subject, message, where=where, observed=losses[step], limit=reference, hint=hint)]


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
    parameters together are off by more than that of their norm and a larger loss scale cures it.
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
        worst = max(weights, key=lambda loss: loss.lost)
        others = listed((f"{loss.name} {loss.lost:.1%}" for loss in weights[1:]), _LISTED - 1)
        more = f"; also {others}" if others else ""
        message = (
            f"what is nonzero in float64 must not become zero; {worst.lost:.1%} of the gradient of {worst.name} did "
            f"({worst.zero:,} of {worst.known:,} elements, {worst.subnormal:,} more are subnormal) {at}{more}"
        )
        return [GRADIENT_UNDERFLOW.fail(stats.subject, message, **_evidence(stats, worst, worst.lost, limits))]
    if damage and stats.underflow is not None:
        message = f"what is nonzero in float64 must not vanish on the way to a parameter{damage}"
        evidence = _evidence(stats, None, stats.underflow.error, limits)
        evidence["unit"] = "share of the norm"
        return [GRADIENT_UNDERFLOW.fail(stats.subject, message, **evidence)]
    worst = max(finite, key=lambda loss: loss.share)
    text = f"of {counted(len(finite), 'gradients')} none lost more than {worst.share:.2%} of its elements {at}"
    text += f" in step {stats.step}"
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
    where = Where("backward", worst.name.rpartition(".")[0] if worst else "", step=stats.step)
    return Evidence(where=where, observed=observed, limit=limits.underflow, hint=larger_scale_hint(stats.scale))


def larger_scale_hint(scale: float) -> str:
    """How to keep gradients from vanishing at a loss scale; 1 stands for none."""
    if scale == 1.0:
        return "scale the loss (torch.amp.GradScaler), or use bfloat16; `loss-scale` reports which scales serve"
    return "see `loss-scale` for the scales that serve; if none does, keep this module in float32 or bfloat16"


def gradient_table(stats: GradientStats) -> Table | None:
    """The gradients that lost most, at most 40."""
    worst = sorted((loss for loss in stats.gradients if loss.known), key=lambda loss: -loss.faint)[:_ROWS]
    if not worst:
        return None
    columns = ("gradient of", "dtype", "known", "zero here", "lost", "zero or subnormal", "norm lost")
    rows = [(o.name, o.dtype, o.known, o.zero, o.lost, o.faint, o.norm) for o in worst]
    note = f"step {stats.step}, loss scale {stats.scale:g}; known: nonzero in float64, and determined by the data"
    return Table("gradients compared with float64", columns, rows, GRADIENT_UNDERFLOW.slug, note)
