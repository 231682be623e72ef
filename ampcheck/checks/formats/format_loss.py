"""Requires: In a recipe that is asked about, such as float8 rowwise, MXFP8 or NVFP4, each linear layer keeps its output
and its gradients above their own noise. A warning, never a failure: the run itself is not in this format.

Measured: Each linear layer computes its three products a second time in the user's own forward and backward pass, with
both operands cast as the recipe casts them: elements, scales and blocks bit for bit. The error is that of the whole
product, or of half of its rows if that is worse, as signal to noise; e4m3 with a scale of its own leaves some 30 dB,
e2m1 some 17 dB. Then all layers run in the recipe, which gives the change of the loss and of all gradients. What the
accelerator rounds inside a product is not emulated.

Causes: An outlier in a tensor with one scale, which flushes the others to zero; gradients that span more binades than
the format has; a block that is padded with large values; e5m2 where e4m3 has the range.

Fix: Keep the layer in 16 bits, scale by rows or blocks, or keep the gradient of weights in high precision
(rowwise_with_gw_hp). `ampcheck whatif --budget` says which layers to keep, as a filter for torchao.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampcheck.core.check import Check, first_findings
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Where
from ampcheck.records.whatif import FormatLoss, LayerLoss, WhatIf, decibels

CHECK = Check("format-loss", "formats", __doc__, unit="dB", needs=("WhatIf",), order=770)

LOST = 10.0
"""Decibels below which a product is lost: a tenth of its power is noise."""

_WORDS = {"forward": "output", "grad_input": "gradient of the input", "grad_weight": "gradient of the weight"}
_PHASES = {"forward": "forward", "grad_input": "backward", "grad_weight": "backward"}
_HINT = "keep the layer in 16 bits, or take a recipe with smaller blocks; --budget writes the filter"


def check(what: WhatIf, limits: Limits) -> Iterator[Finding]:
    """The layers that a recipe loses; for each recipe without any what it costs."""
    if not what.losses or not any(loss.layers for loss in what.losses):
        others = ", ".join(f"{count} {reason}" for reason, count in what.unseen.items())
        yield CHECK.absent(what.subject, "no linear layer ran" + (f"; not emulated: {others}" if others else ""))
        return
    for loss in what.losses:
        lost = [layer for layer in loss.layers if layer.products and layer.worst[1].decibels < LOST]
        yield from first_findings([_lost(loss, layer) for layer in sorted(lost, key=lambda one: one.worst[1].decibels)])
        if not lost:
            yield _kept(loss) if _is_finite(loss) else _not_finite(loss)


def _lost(loss: FormatLoss, layer: LayerLoss) -> Finding:
    product, worst = layer.worst
    shares = f"; {worst.flushed:.0%} of an operand becomes zero" if worst.flushed > 0.01 else ""
    shares += f"; {worst.saturated:.1%} saturates" if worst.saturated > 0.001 else ""
    message = (
        f"{loss.recipe} must leave the {_WORDS[product]} of {layer.module or 'the layer'} {LOST:g} dB above its noise; "
        f"it leaves {worst.decibels:.1f} dB{shares}"
    )
    where = Where(_PHASES[product], layer.module)
    return CHECK.warn(loss.subject, message, where=where, observed=worst.decibels, limit=LOST, hint=_HINT)


def _is_finite(loss: FormatLoss) -> bool:
    return all(math.isfinite(value) for value in (loss.error, loss.loss, loss.reference) if value is not None)


def _not_finite(loss: FormatLoss) -> Finding:
    found = f"{loss.of} off by {loss.error:.2g} of their norm"
    if loss.loss is not None and loss.reference is not None:
        found += f", a loss of {loss.loss:.4g}, and one of {loss.reference:.4g} in the model's own precision"
    message = f"{loss.recipe} must leave the run of the whole model finite; found {found}"
    return CHECK.warn(loss.subject, message, observed=decibels(loss.error), limit=LOST, hint=_HINT)


def _kept(loss: FormatLoss) -> Finding:
    layers = [layer for layer in loss.layers if layer.products]
    if not layers:
        return CHECK.absent(loss.subject, f"{loss.recipe}: all products that it narrows are zero, or it narrows none")
    worst = min(layers, key=lambda layer: layer.worst[1].decibels)
    product, least = worst.worst
    cost = f"all layers in it move the {loss.of} by {loss.error:.2g} of their norm ({decibels(loss.error):.0f} dB)"
    if loss.loss is not None and loss.reference and math.isfinite(loss.loss):
        cost += f" and the loss by {(loss.loss - loss.reference) / abs(loss.reference):+.1e}"
    message = (
        f"{loss.recipe}: the {_WORDS[product]} of {worst.module or 'the layer'} keeps least, {least.decibels:.1f} dB "
        f"of signal to noise; {cost}"
    )
    return CHECK.passed(loss.subject, message, len(layers), observed=least.decibels, limit=LOST)
