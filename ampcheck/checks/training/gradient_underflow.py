"""Requires: What is nonzero in float64 stays nonzero: no parameter loses more than `underflow` of the elements of its
gradient to zero.

Measured: Float64 is carried along with every tensor of the step, and each gradient of the first step that the scaler
does not skip is compared element by element; those of the later steps too, of which the last two are judged. Only
elements that the data determine are counted: moving the data by one rounding must leave half of them. Elements that are
zero in float64 but not in low precision estimate the noise, which is subtracted. ampcheck.watch has no reference: it
warns where a gradient has many zeros and the rest ends abruptly at the smallest number of float16 at the loss scale in
use, and where a gradient is zero in every measured step.

Causes: float16 autocast without a GradScaler, a scale that is too small, a loss that is divided by much or has a small
weight, one part of the model with much smaller gradients than the rest.

Fix: Scale the loss (torch.amp.GradScaler), keep the part in float32 or bfloat16; see loss-scale for the scales that
work.
"""

from __future__ import annotations

from dataclasses import replace

from ampcheck.core.check import Check, Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Where
from ampcheck.core.subject import Kind
from ampcheck.core.text import at_scale, counted, listed
from ampcheck.records.gradients import GradientLoss, GradientStats

CHECK = Check(
    "gradient-underflow",
    "training",
    __doc__,
    unit="share of the elements",
    subjects=(Kind.TRAINING, Kind.CALL),
    needs=("GradientStats",),
    order=600,
    evidence=("tests/corpus/training/scale_too_small_for_the_loss", "nanogpt: no scaler in float16"),
)

_LISTED = 5


def check(stats: GradientStats, limits: Limits) -> list[Finding]:
    """Check that what is nonzero in float64 stays nonzero, in every parameter.

    Fails for a parameter that loses more than `limits.underflow` of its elements, and where the gradients of all
    parameters together are off by more than that of their norm and a larger loss scale cures it. Warns of gradients
    that were only counted: what was flushed looks like what is zero.
    """
    if stats.skipped:
        return [CHECK.incomplete(stats.subject, f"not judged: {stats.skipped}", hint=stats.hint)]
    known = [loss for loss in stats.gradients if loss.known]
    if not known:
        why = "no gradient is nonzero in float64" if stats.gradients else "no parameter was given a gradient"
        hint = (
            "start from weights and data of which the loss depends: every gradient is exactly zero in float64"
            if stats.gradients
            else "let the mapping name the model whose weights this loss reaches, and leave requires_grad on"
        )
        return [CHECK.incomplete(stats.subject, f"not judged: {why} in step {stats.step}", hint=hint)]
    finite = [loss for loss in known if loss.nonfinite < loss.numel]
    if not finite:
        text = f"not judged: every gradient was infinite or NaN in step {stats.step}: see overflow and loss-scale"
        return [CHECK.skip(stats.subject, text)]
    at = at_scale(stats.scale)
    weights = [loss for loss in known if loss.share > limits.underflow]
    damage = stats.damage_text(limits)
    if weights:
        worst, *rest = sorted(weights, key=lambda loss: -loss.lost)
        others = listed((f"{loss.name} {loss.lost:.1%}" for loss in rest), _LISTED - 1)
        more = f"; also {others}" if others else ""
        evidence = _evidence(stats, worst, worst.lost, limits)
        if stats.counted:
            message = f"gradients must not vanish; of that of {worst.name} {worst.lost:.1%} is zero{worst.marks}{more}"
            return [CHECK.warn(stats.subject, f"{message} ({stats.counted})", **evidence)]
        message = (
            f"what is nonzero in float64 must not become zero; {worst.lost:.1%} of the gradient of {worst.name} did "
            f"({worst.zero:,} of {worst.known:,} elements, {worst.subnormal:,} more are subnormal) {at}{more}"
        )
        return [CHECK.fail(stats.subject, message, **evidence)]
    if damage and stats.underflow is not None:
        message = f"what is nonzero in float64 must not vanish on the way to a parameter{damage}"
        evidence = _evidence(stats, None, stats.underflow.error, limits)
        evidence["unit"] = "share of the norm"
        return [CHECK.fail(stats.subject, message, **evidence)]
    worst = max(finite, key=lambda loss: loss.share)
    text = f"of {counted(len(finite), 'gradients')} none lost more than {worst.share:.2%} of its elements {at}"
    text += f" in step {stats.step}"
    if stats.counted:
        text = f"of {counted(len(finite), 'gradients')} none shows the marks of flushing ({stats.counted})"
    if stats.later:
        text += f"; parameters were looked at up to step {stats.later[-1].step}"
    evidence = _evidence(stats, worst, worst.share, limits)
    evidence["hint"] = ""
    return [CHECK.passed(stats.subject, text, len(finite), **evidence)]


def _evidence(stats: GradientStats, worst: GradientLoss | None, observed: float, limits: Limits) -> Evidence:
    where = replace(worst.where, module=worst.name.rpartition(".")[0]) if worst else Where("backward")
    hint = "see `loss-scale` for the scales that serve; if none does, keep this module in float32 or bfloat16"
    if stats.scale == 1.0:
        hint = "scale the loss (torch.amp.GradScaler), or use bfloat16; `loss-scale` reports which scales serve"
    if stats.counted:
        hint = f"{hint}; ampcheck.audit compares with a float64 backward"
    return Evidence(where=replace(where, step=stats.step), observed=observed, limit=limits.underflow, hint=hint)
