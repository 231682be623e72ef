"""Requires: Training whose linear layers multiply in a recipe of narrow formats ends with finite losses, and with
weights that are nearer to those of float64 than the weights that it began with. A warning, never a failure: the
training itself is not in this format.

Measured: Training runs once under a shadow, which has the losses and weights of float64 beside its own. Then it runs in
each recipe, from equal weights, data and random numbers, with the operands of each product of a linear layer cast as
the recipe casts them. The drift is the distance of the last weights from those of float64, over the way that these
went: 0 is float64, 1 is as far off as weights that were not trained. A random recipe (stochastic rounding, random
signs) runs three times.

Causes: A scale of earlier steps that the next operand exceeds; gradients that one scale for the whole tensor flushes to
zero; a first or last layer that takes outliers; updates smaller than the spacing of 16-bit weights.

Fix: Keep the first and the last layer, or those that the table names, in 16 bits; scale by rows or blocks; round
gradients stochastically; or keep the gradient of weights in high precision (rowwise_with_gw_hp).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampcheck.core.check import Check, Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.records.whatif import TrainingLoss, TrainingWhatIf

CHECK = Check("format-drift", "formats", __doc__, unit="of the way", needs=("TrainingWhatIf",), order=771)

UNTRAINED = 1.0
"""The drift of weights that stay where they began."""

_WORDS = {"forward": "output", "grad_input": "input's gradient", "grad_weight": "weight's gradient"}


def check(what: TrainingWhatIf, limits: Limits) -> Iterator[Finding]:
    """For each recipe how far it takes training from float64."""
    if not any(len(loss.layers) > len(loss.kept) for loss in what.losses):
        others = ", ".join(f"{count} {reason}" for reason, count in what.unseen.items())
        yield CHECK.absent(what.subject, "no linear layer ran" + (f"; not emulated: {others}" if others else ""))
        return
    for loss in what.losses:
        yield _judged(what, loss)


def _judged(what: TrainingWhatIf, loss: TrainingLoss) -> Finding:
    name = f"{loss.recipe} but for {' and '.join(loss.kept)}" if loss.kept else loss.recipe
    own, steps = what.own, len(loss.losses)
    broken = next((step for step, value in enumerate(loss.losses) if not math.isfinite(value)), None)
    evidence: Evidence = {"observed": loss.drift, "limit": UNTRAINED, "hint": _hint(loss)}
    if broken is None and loss.drift < UNTRAINED:
        spread = f" ({loss.drifts[0]:.2g} to {loss.drifts[1]:.2g} in {loss.runs} runs)" if loss.drifts else ""
        message = (
            f"{name}: after {steps} steps the drift is {loss.drift:.2g}{spread}, and {own.drift:.2g} in the training's "
            f"own precision; the last loss is {loss.losses[-1]:.4g}, that of float64 {what.exact[-1]:.4g}"
        )
        return CHECK.passed(what.subject, message, steps, observed=loss.drift, limit=UNTRAINED)
    if not (own.drift < UNTRAINED and all(map(math.isfinite, own.losses))):
        message = (
            f"training must stay with float64 in its own precision to be judged in {name}; its own precision leaves a "
            f"drift of {own.drift:.2g}, and a last loss of {own.losses[-1]:.4g}"
        )
        evidence["hint"] = "ampcheck audit says where it is lost"
        return CHECK.undecided(what.subject, message, **evidence)
    if broken is not None:
        message = f"{name} must leave losses finite; that of step {broken} is {loss.losses[broken]}{_worst(loss)}"
    else:
        message = (
            f"{name} must end nearer to the weights of float64 than training began; after {steps} steps the drift is "
            f"{loss.drift:.2g}, and {own.drift:.2g} in the training's own precision{_worst(loss)}"
        )
    return CHECK.warn(what.subject, message, **evidence)


def _worst(loss: TrainingLoss) -> str:
    """Return what saturated or became zero most."""
    parts = [(loss.saturated, "saturates"), (loss.flushed, "becomes zero")]
    (module, product, share), what = max(parts, key=lambda part: part[0][2])
    if share < 0.01:
        return ""
    return f"; {share:.0%} of an operand of the {_WORDS[product]} of {module or 'the layer'} {what}"


def _hint(loss: TrainingLoss) -> str:
    ends = "" if loss.kept else "; the table has the same with the first and the last layer in 16 bits"
    return f"keep layers in 16 bits, or take a recipe with smaller blocks{ends}"
