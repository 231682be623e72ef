"""Losses, weights and gradients that become infinite or NaN: where, and how to mend it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from ampcheck.catalog.numerics import COVERAGE, LOSS_DTYPE, NONFINITE_GRADIENT, OVERFLOW
from ampcheck.core.run import Chart, Finding, Series, Where
from ampcheck.core.text import listed
from ampcheck.training.loop import TrainingLoop, plain_values

LAST = 3
"""So many steps at the end with a loss that is not finite are no passing overflow any more."""

_LISTED = 3
_POINTS = 400
_CASTS = ("aten::_to_copy", "aten::copy_", "prims::convert_element_type")
_OFF = "torch.autocast(device, enabled=False)"


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
    parameters = ((name, parameter) for name, parameter in loop.parameters() if parameter.device.type != "meta")
    return tuple(name for name, parameter in parameters if not bool(plain_values(parameter).isfinite().all()))


def measure_finite(loop: TrainingLoop, losses: Sequence[float], before: tuple[str, ...]) -> FiniteStats:
    """The losses and weights of a loop that ran; before: the parameters that were not finite at the start."""
    weights = sum(parameter.device.type != "meta" for _, parameter in loop.parameters())
    return FiniteStats(loop.name, tuple(losses), before, nonfinite_parameters(loop), weights)


def check_finite(stats: FiniteStats) -> list[Finding]:
    """`nonfinite-gradient`: weights stay finite. `overflow`: so does the loss, a passing overflow aside."""
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
        where, many = Where("update", names[0].rpartition(".")[0]), len(names)
        findings.append(
            NONFINITE_GRADIENT.fail(
                stats.subject, message, where=where, observed=many, limit=0.0, unit="tensors", hint=hint
            )
        )
    lost, first, place = stats.trailing, stats.overflowed, stats.place
    if first is not None:
        message = (
            f"what a step returns must be finite; from step {first} on each of {lost} steps returned {stats.losses[-1]}"
            f"{_first_op(place)}"
        )
        hint = "nothing is learned from such a loss; look for the first op with the audit of the model in forward"
        hint = mend_nonfinite(place) if place else hint
        where = replace(place or Where("forward"), step=first)
        findings.append(
            OVERFLOW.fail(stats.subject, message, where=where, observed=lost, limit=0.0, unit="steps", hint=hint)
        )
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
    if place.op.removesuffix(".default") in _CASTS:
        return (
            f"the cast overflows: it is given values beyond the largest of the narrow format (65504 in float16); "
            f"normalise or clamp them before it, or keep {here} in float32 (with {_OFF})"
        )
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
    return (Chart("line", f"Loss: {subject}", "step", "loss", series, check=COVERAGE.slug, note=note),)
