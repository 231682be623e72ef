"""What gradients beside float64 say. Pure functions from `GradientStats` to findings."""

from __future__ import annotations

from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Table, Verdict, Where, passed
from ampcheck.training.gradients.underflow import GradientLoss, GradientStats

_LISTED = 5
_ROWS = 40


def check_gradients(stats: GradientStats, limits: Limits) -> list[Finding]:
    """`gradient-underflow`: what is nonzero in float64 stays nonzero, in every parameter.

    Fails for a parameter that loses more than `limits.underflow` of its elements, for the gradient of a module's output
    that loses more than that of its norm, and where the gradients of all parameters together are off by more than that
    of their norm and a larger loss scale cures it. An output that loses elements but little of its norm only warns: the
    many tiny gradients of a softmax over a large vocabulary vanish in every healthy run.
    """
    slug = "gradient-underflow"
    if stats.skipped:
        verdict = Verdict.INCOMPLETE if stats.prevented else Verdict.SKIP
        return [Finding(slug, verdict, stats.subject, f"not judged: {stats.skipped}", hint=stats.hint)]
    known = [one for one in stats.gradients if one.known]
    if not known:
        some = any(one.kind == "parameter" for one in stats.gradients)
        why = "no gradient is nonzero in float64" if some else "no parameter was given a gradient"
        hint = (
            "start from weights and data of which the loss depends: every gradient is exactly zero in float64"
            if some
            else "let the mapping name the model whose weights this loss reaches, and leave requires_grad on"
        )
        message = f"not judged: {why} in step {stats.step}"
        return [Finding(slug, Verdict.INCOMPLETE, stats.subject, message, hint=hint)]
    at = f"at loss scale {stats.scale:g}"
    hint = _hint(stats)
    found: list[Finding] = []
    weights = [one for one in known if one.kind == "parameter" and one.share > limits.underflow]
    outputs = [one for one in known if one.kind == "output" and one.lost > limits.underflow]
    if weights:
        worst = max(weights, key=lambda one: one.lost)
        names = ", ".join(f"{one.name} {one.lost:.1%}" for one in weights[1:_LISTED])
        more = f"; also {names}" if names else ""
        more += f" and {len(weights) - _LISTED} more" if len(weights) > _LISTED else ""
        message = (
            f"what is nonzero in float64 must not become zero; {worst.lost:.1%} of the gradient of {worst.name} did "
            f"({worst.zero:,} of {worst.known:,} elements, {worst.subnormal:,} more are subnormal) {at}{more}"
        )
        found.append(_finding(slug, Verdict.FAIL, stats, worst, message, worst.lost, limits, hint))
    heavy = [one for one in outputs if one.norm > limits.underflow]
    off = is_damaged(stats, limits)
    if outputs and not weights:
        worst = max(heavy or outputs, key=lambda one: (one.norm, one.lost))
        message = (
            f"what is nonzero in float64 must not become zero; {worst.lost:.1%} of the gradient of the output of "
            f"{worst.name or 'the model'} did ({worst.zero:,} of {worst.known:,} elements, {worst.norm:.1%} of its "
            f"norm) {at}"
            f"{told_damage(stats, limits) or ('' if heavy else '; no parameter lost its own')}"
        )
        verdict = Verdict.FAIL if heavy or off else Verdict.WARN
        found.append(_finding(slug, verdict, stats, worst, message, worst.lost, limits, hint))
    worst = max(known, key=lambda one: one.share)
    if off and not found and stats.underflow is not None:
        message = f"what is nonzero in float64 must not vanish on the way to a parameter{told_damage(stats, limits)}"
        unit, place = "share of the norm", Where("backward", step=stats.step)
        error = stats.underflow.error
        found.append(Finding(slug, Verdict.FAIL, stats.subject, message, place, error, limits.underflow, unit, hint))
    if found:
        return found
    text = f"of {len(known)} gradients none lost more than {worst.share:.2%} of its elements {at} in step {stats.step}"
    where = Where("backward", worst.module, step=stats.step)
    unit = "share of the elements"
    return [
        passed(
            slug, stats.subject, text, len(known), where=where, observed=worst.share, limit=limits.underflow, unit=unit
        )
    ]


def is_damaged(stats: GradientStats, limits: Limits) -> bool:
    """Whether the gradients of all parameters together lose more than `limits.underflow` of their norm to underflow."""
    return stats.underflow is not None and stats.underflow.error > limits.underflow


def told_damage(stats: GradientStats, limits: Limits) -> str:
    """What the underflow did to the gradients of all parameters, to go on with in a sentence; empty if it is little."""
    lost = stats.underflow
    if lost is None or not is_damaged(stats, limits):
        return ""
    return (
        f"; the gradients of all parameters together are off by {lost.error:.1%} of their norm at loss scale "
        f"{stats.scale:g}, and by {lost.cured:.2%} at {lost.scale:g}: the rest vanished"
    )


def _hint(stats: GradientStats) -> str:
    if stats.scale == 1.0:
        return "scale the loss (torch.amp.GradScaler), or use bfloat16; `loss-scale` tells which scales serve"
    return "see `loss-scale` for the scales that serve; if none does, keep this module in float32 or bfloat16"


def _finding(
    slug: str,
    verdict: Verdict,
    stats: GradientStats,
    worst: GradientLoss,
    message: str,
    observed: float,
    limits: Limits,
    hint: str,
) -> Finding:
    where = Where("backward", worst.module, step=stats.step)
    unit = "share of the elements"
    return Finding(slug, verdict, stats.subject, message, where, observed, limits.underflow, unit, hint)


def gradient_table(stats: GradientStats) -> Table | None:
    """The gradients that lost most, at most 40."""
    worst = sorted((one for one in stats.gradients if one.known), key=lambda one: (-one.faint, one.kind))[:_ROWS]
    if not worst:
        return None
    columns = ("gradient of", "kind", "dtype", "known", "zero here", "lost", "zero or subnormal", "norm lost")
    rows = [(o.name or "the model", o.kind, o.dtype, o.known, o.zero, o.lost, o.faint, o.norm) for o in worst]
    note = f"step {stats.step}, loss scale {stats.scale:g}; known: nonzero in float64, and float32 agrees"
    return Table("gradients beside float64", columns, rows, "gradient-underflow", note)
