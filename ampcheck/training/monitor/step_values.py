"""The figures of one measured step: what the sums of a monitored loop gained by it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ampcheck.training.monitor.sums import MonitorStats


@dataclass(frozen=True, slots=True)
class _Totals:
    """Sums over all parameters and measured steps; squares are of norms."""

    elements: int = 0
    zeros: int = 0
    subnormal: int = 0
    nonzero: int = 0
    nonfinite: int = 0
    due: int = 0
    unchanged: int = 0
    gradient: float = 0.0
    update: float = 0.0
    weight: float = 0.0

    @classmethod
    def of(cls, stats: MonitorStats) -> _Totals:
        gradients = [gradient for _, gradient in stats.gradients]
        updates = [param.update for param in stats.parameters if param.update is not None]
        return cls(
            elements=sum(gradient.health.numel for gradient in gradients),
            zeros=sum(gradient.health.zeros for gradient in gradients),
            subnormal=sum(gradient.subnormal for gradient in gradients),
            nonzero=sum(gradient.health.nonzero for gradient in gradients),
            nonfinite=sum(gradient.health.nonfinite for gradient in gradients),
            due=sum(update.due for update in updates),
            unchanged=sum(update.unchanged for update in updates),
            gradient=sum(gradient.health.sumsq for gradient in gradients),
            update=sum(update.update**2 for update in updates),
            weight=sum(update.weight**2 for update in updates),
        )


class StepValues:
    """The figures of one measured step after another. read: the statistics so far, which waits for the device."""

    def __init__(self, read: Callable[[], MonitorStats]) -> None:
        self._read, self._before = read, _Totals.of(read())

    def next(self, loss_scale: float | None) -> dict[str, float]:
        """The figures, by name, of what was measured since the last call.

        Norms are those of all parameters together, gradients unscaled. Zeros are a share of the elements of the
        gradients; subnormal, a share of the nonzero ones, are those that float16 holds as such at the loss scale;
        unchanged is a share of the elements of 16-bit weights that were due to change. A figure that does not apply, or
        is not finite, is left out.
        """
        stats = self._read()
        before, after = self._before, _Totals.of(stats)
        self._before = after

        def gained(name: str) -> float:
            return max(float(getattr(after, name) - getattr(before, name)), 0.0)

        def share(part: str, whole: str) -> float:
            return gained(part) / gained(whole) if gained(whole) else math.nan

        optimizer = stats.optimizers[0]
        scaled = loss_scale is not None
        values = {
            "loss scale": math.nan if loss_scale is None else loss_scale,
            "skipped steps": float(stats.skipped) if scaled else math.nan,
            "learning rate": optimizer.rates[-1] if optimizer.rates else math.nan,
            "gradient norm": math.sqrt(gained("gradient")) if gained("elements") else math.nan,
            "gradient zeros": share("zeros", "elements"),
            "gradient subnormal": share("subnormal", "nonzero") if scaled else math.nan,
            "gradient inf or NaN": gained("nonfinite"),
            "update norm": math.sqrt(gained("update")) if gained("weight") else math.nan,
            "update by weight": math.sqrt(share("update", "weight")) if gained("weight") else math.nan,
            "updates unchanged": share("unchanged", "due"),
        }
        return {name: value for name, value in values.items() if math.isfinite(value)}
