"""The figures of one measured step: what the sums of a monitored loop gained by it."""

from __future__ import annotations

import math
from collections.abc import Callable

from ampcheck.training.monitor.sums import MonitorStats


def _totals(stats: MonitorStats) -> dict[str, float]:
    """Sums over all parameters and measured steps; of norms, those of their squares."""
    gradients = [gradient for _, gradient in stats.gradients]
    health = [gradient.health for gradient in gradients]
    updates = [param.update for param in stats.parameters if param.update is not None]
    return {
        "elements": sum(h.numel for h in health),
        "zeros": sum(h.zeros for h in health),
        "subnormal": sum(gradient.subnormal for gradient in gradients),
        "nonzero": sum(h.nonzero for h in health),
        "nonfinite": sum(h.nonfinite for h in health),
        "due": sum(update.due for update in updates),
        "unchanged": sum(update.unchanged for update in updates),
        "gradient": sum(h.sumsq for h in health),
        "update": sum(update.update**2 for update in updates),
        "weight": sum(update.weight**2 for update in updates),
    }


class StepValues:
    """The figures of one measured step after another. read: the statistics so far, which waits for the device."""

    def __init__(self, read: Callable[[], MonitorStats]) -> None:
        self._read, self._before = read, _totals(read())

    def next(self, loss_scale: float | None) -> dict[str, float]:
        """The figures, by name, of what was measured since the last call.

        Norms are those of all parameters together, gradients unscaled. Zeros are a share of the elements of the
        gradients; subnormal, a share of the nonzero ones, are those that float16 holds as such at the loss scale;
        unchanged is a share of the elements of 16-bit weights that were due to change. A figure that does not apply, or
        is not finite, is left out.
        """
        stats = self._read()
        after = _totals(stats)
        gained = {name: max(float(total - self._before[name]), 0.0) for name, total in after.items()}
        self._before = after

        def share(part: str, whole: str) -> float:
            return gained[part] / gained[whole] if gained[whole] else math.nan

        optimizer = stats.optimizers[0]
        scaled = loss_scale is not None
        values = {
            "loss scale": math.nan if loss_scale is None else loss_scale,
            "skipped steps": float(stats.skipped) if scaled else math.nan,
            "learning rate": optimizer.rates[-1] if optimizer.rates else math.nan,
            "gradient norm": math.sqrt(gained["gradient"]) if gained["elements"] else math.nan,
            "gradient zeros": share("zeros", "elements"),
            "gradient subnormal": share("subnormal", "nonzero") if scaled else math.nan,
            "gradient inf or NaN": gained["nonfinite"],
            "update norm": math.sqrt(gained["update"]) if gained["weight"] else math.nan,
            "update by weight": math.sqrt(share("update", "weight")) if gained["weight"] else math.nan,
            "updates unchanged": share("unchanged", "due"),
        }
        return {name: value for name, value in values.items() if math.isfinite(value)}
