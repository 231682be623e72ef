"""Ops on lists of tensors that decide, and fused optimizers."""

from __future__ import annotations

from typing import Any

from ampcheck.shadow.call import Call, Side
from ampcheck.shadow.rules.registry import restart, rule


@rule("_amp_foreach_non_finite_check_and_unscale_")
def _unscale(call: Call, side: Side) -> Any:
    """Gradients are unscaled; whether one is infinite is a decision."""
    gradients, found_inf, inverse = call.args[:3]
    factor = side.of(inverse)
    for gradient in gradients:
        side.of(gradient).mul_(factor)
    side.of(found_inf).copy_(found_inf)
    return None


rule("_amp_update_scale_")(restart)


@rule("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
def _fused_step(call: Call, side: Side) -> Any:
    """The kernels read the scale and the decision of a `GradScaler` as float32: those of the run."""
    scaler: dict[str, Any] = {name: call.kwargs[name] for name in ("grad_scale", "found_inf") if name in call.kwargs}
    return side.run(call, lambda *args, **kwargs: call.op(*args, **(kwargs | scaler)))
