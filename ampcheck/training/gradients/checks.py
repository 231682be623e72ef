"""Checks of gradients compared with float64. Pure functions from `GradientStats` to findings."""

from __future__ import annotations

from ampcheck.catalog.training import GRADIENT_UNDERFLOW
from ampcheck.core.check import Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Table, Verdict, Where
from ampcheck.training.gradients.watch import GradientLoss, GradientStats

_LISTED = 5
_ROWS = 40


def check_gradients(stats: GradientStats, limits: Limits) -> list[Finding]:
    """`gradient-underflow`: what is nonzero in float64 stays nonzero, in every parameter.

    Fails for a parameter that loses more than `limits.underflow` of its elements, for the gradient of a module's output
    that loses more than that of its norm, and where the gradients of all parameters together are off by more than that
    of their norm and a larger loss scale cures it. An output that loses elements but little of its norm only warns: the
    many tiny gradients of a softmax over a large vocabulary vanish in every healthy run.
    """
    if stats.skipped:
        verdict = Verdict.INCOMPLETE if stats.prevented else Verdict.SKIP
        return [GRADIENT_UNDERFLOW.finding(verdict, stats.subject, f"not judged: {stats.skipped}", hint=stats.hint)]
    known = [loss for loss in stats.gradients if loss.known]
    if not known:
        some = any(loss.kind == "parameter" for loss in stats.gradients)
        why = "no gradient is nonzero in float64" if some else "no parameter was given a gradient"
        hint = (
            "start from weights and data of which the loss depends: every gradient is exactly zero in float64"
            if some
            else "let the mapping name the model whose weights this loss reaches, and leave requires_grad on"
        )
        return [GRADIENT_UNDERFLOW.incomplete(stats.subject, f"not judged: {why} in step {stats.step}", hint=hint)]
    at = f"at loss scale {stats.scale:g}"
    weights = [loss for loss in known if loss.kind == "parameter" and loss.share > limits.underflow]
    outputs = [loss for loss in known if loss.kind == "output" and loss.lost > limits.underflow]
    damage = damage_text(stats, limits)
    if weights:
        worst = max(weights, key=lambda loss: loss.lost)
        names = ", ".join(f"{loss.name} {loss.lost:.1%}" for loss in weights[1:_LISTED])
        more = f"; also {names}" if names else ""
        more += f" and {len(weights) - _LISTED} more" if len(weights) > _LISTED else ""
        message = (
            f"what is nonzero in float64 must not become zero; {worst.lost:.1%} of the gradient of {worst.name} did "
            f"({worst.zero:,} of {worst.known:,} elements, {worst.subnormal:,} more are subnormal) {at}{more}"
        )
        return [GRADIENT_UNDERFLOW.fail(stats.subject, message, **_evidence(stats, worst, worst.lost, limits))]
    if outputs:
        heavy = [loss for loss in outputs if loss.norm > limits.underflow]
        worst = max(heavy or outputs, key=lambda loss: (loss.norm, loss.lost))
        message = (
            f"what is nonzero in float64 must not become zero; {worst.lost:.1%} of the gradient of the output of "
            f"{worst.name or 'the model'} did ({worst.zero:,} of {worst.known:,} elements, {worst.norm:.1%} of its "
            f"norm) {at}{damage or ('' if heavy else '; no parameter lost its own')}"
        )
        verdict = Verdict.FAIL if heavy or damage else Verdict.WARN
        evidence = _evidence(stats, worst, worst.lost, limits)
        return [GRADIENT_UNDERFLOW.finding(verdict, stats.subject, message, **evidence)]
    if damage and stats.underflow is not None:
        message = f"what is nonzero in float64 must not vanish on the way to a parameter{damage}"
        evidence = _evidence(stats, None, stats.underflow.error, limits)
        evidence["unit"] = "share of the norm"
        return [GRADIENT_UNDERFLOW.fail(stats.subject, message, **evidence)]
    worst = max(known, key=lambda loss: loss.share)
    text = f"of {len(known)} gradients none lost more than {worst.share:.2%} of its elements {at} in step {stats.step}"
    evidence = _evidence(stats, worst, worst.share, limits)
    evidence["hint"] = ""
    return [GRADIENT_UNDERFLOW.passed(stats.subject, text, len(known), **evidence)]


def damage_text(stats: GradientStats, limits: Limits) -> str:
    """What the underflow did to the gradients of all parameters together, to append to a message.

    Empty where they lose no more than `limits.underflow` of their norm.
    """
    lost = stats.underflow
    if lost is None or lost.error <= limits.underflow:
        return ""
    return (
        f"; the gradients of all parameters together are off by {lost.error:.1%} of their norm at loss scale "
        f"{stats.scale:g}, and by {lost.cured:.2%} at {lost.scale:g}: the rest vanished"
    )


def _evidence(stats: GradientStats, worst: GradientLoss | None, observed: float, limits: Limits) -> Evidence:
    where = Where("backward", worst.module if worst else "", step=stats.step)
    return Evidence(where=where, observed=observed, limit=limits.underflow, hint=larger_scale_hint(stats.scale))


def larger_scale_hint(scale: float) -> str:
    """How to keep gradients from vanishing at a loss scale; 1 stands for none."""
    if scale == 1.0:
        return "scale the loss (torch.amp.GradScaler), or use bfloat16; `loss-scale` reports which scales serve"
    return "see `loss-scale` for the scales that serve; if none does, keep this module in float32 or bfloat16"


def gradient_table(stats: GradientStats) -> Table | None:
    """The gradients that lost most, at most 40."""
    worst = sorted((loss for loss in stats.gradients if loss.known), key=lambda loss: (-loss.faint, loss.kind))[:_ROWS]
    if not worst:
        return None
    columns = ("gradient of", "kind", "dtype", "known", "zero here", "lost", "zero or subnormal", "norm lost")
    rows = [(o.name or "the model", o.kind, o.dtype, o.known, o.zero, o.lost, o.faint, o.norm) for o in worst]
    note = f"step {stats.step}, loss scale {stats.scale:g}; known: nonzero in float64, and determined by the data"
    return Table("gradients compared with float64", columns, rows, GRADIENT_UNDERFLOW.slug, note)
