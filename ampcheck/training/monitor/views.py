"""Tables and charts of a monitored training loop, and the figures of one measured step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ampcheck.core.bands import bands_of
from ampcheck.core.formats import FORMATS
from ampcheck.core.run import Band, Chart, Scalar, Series, Table
from ampcheck.health import TensorHealth
from ampcheck.records.scales import LossScaleStats
from ampcheck.training.gradients.summary import loss_chart
from ampcheck.training.monitor.sums import MonitorStats, ParameterStats
from ampcheck.training.scale.stats import loss_scale_chart

_ROWS = 40


def monitor_tables(stats: MonitorStats) -> tuple[Table, ...]:
    """The gradients and updates by parameter, the worst first, and the optimizers with their scaler."""
    return tuple(table for table in (_parameters(stats), _optimizers(stats)) if table.rows)


def monitor_charts(stats: MonitorStats, scale: LossScaleStats | None) -> tuple[Chart, ...]:
    """The loss scale over its updates, the losses, and the ranges of the gradients."""
    of_scale = loss_scale_chart(scale) if scale is not None else ()
    return (*of_scale, *loss_chart(stats.subject, stats.losses), *_ranges(stats))


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


def _parameters(stats: MonitorStats) -> Table:
    ordered = sorted(
        (param for param in stats.parameters if param.gradient or param.update), key=_badness, reverse=True
    )
    columns = (
        *("parameter", "dtype", "elements", "gradient rms", "largest", "smallest", "zeros", "subnormal", "inf or NaN"),
        *("update by weight", "unchanged", "measured"),
    )
    shares = "zeros and unchanged are shares of the elements; subnormal is the share of the nonzero ones that float16 "
    note = f"every {stats.every}; gradients unscaled; {shares}holds as such at the loss scale"
    if len(ordered) > _ROWS:
        note = f"{_ROWS} of {len(ordered)} parameters, the worst first; {note}"
    rows = tuple(_row(param, bool(stats.enabled)) for param in ordered[:_ROWS])
    return Table(f"Gradients and updates: {stats.subject}", columns, rows, "gradient-underflow", note)


def _badness(param: ParameterStats) -> tuple[float, ...]:
    gradient, update = param.gradient, param.update
    zeros = gradient.health.zeros / gradient.health.numel if gradient and gradient.health.numel else 0.0
    unchanged = update.share if update else 0.0
    return (update.poisoned if update else 0, gradient.bad if gradient else 0, unchanged, zeros)


def _row(param: ParameterStats, scaled: bool) -> tuple[Scalar, ...]:
    gradient, update = param.gradient, param.update
    health = gradient.health if gradient else TensorHealth.empty()
    known = scaled or health.dtype == "float16"
    return (
        *(param.name, param.dtype, param.numel, health.rms, health.amax, health.amin if health.nonzero else None),
        health.zeros / health.numel if health.numel else None,
        gradient.subnormal / health.nonzero if gradient and health.nonzero and known else None,
        health.nonfinite,
        update.relative_update if update and update.squared_values else None,
        update.share if update and update.moved else None,
        max(gradient.calls if gradient else 0, update.steps if update else 0),
    )


def _optimizers(stats: MonitorStats) -> Table:
    columns = "optimizer", "steps", "measured", "skipped", "scale at first", "smallest", "largest", "at last"
    scales = stats.scales
    ends = (scales[0], min(scales), max(scales), scales[-1]) if scales else (None,) * 4
    rows = tuple((o.name, o.steps, o.measured, len(o.skipped) if o.attempts else None, *ends) for o in stats.optimizers)
    return Table(f"Optimizer steps: {stats.subject}", columns, rows, "loss-scale")


def _ranges(stats: MonitorStats) -> Iterator[Chart]:
    spans = [(param.name, span) for param, gradient in stats.gradients if (span := _span(gradient.health))]
    if not spans:
        return
    note = "gradients of the measured steps, unscaled"
    if len(spans) > _ROWS:
        lowest = sorted(spans, key=lambda row: row[1][2])[:_ROWS]
        note = f"the {_ROWS} of {len(spans)} parameters with the smallest medians; {note}"
        spans = [row for row in spans if row in lowest]
    bands: tuple[Band, ...] = ()
    scale = stats.scales[-1] if stats.scales else 0.0
    if 0 < scale < math.inf:
        bands = bands_of(FORMATS["float16"], scale)
    elif any(gradient.health.dtype == "float16" for _, gradient in stats.gradients):
        bands = bands_of(FORMATS["float16"])
    yield Chart(
        "range",
        f"Where the gradients lie: {stats.subject}",
        "magnitude, as a power of two",
        series=tuple(Series(name, span, group="backward") for name, span in spans),
        bands=bands,
        check="gradient-underflow",
        note=note,
    )


def _span(health: TensorHealth) -> tuple[float, ...]:
    """Smallest, 5th percentile, median, 95th percentile and largest magnitude, as powers of two; empty without any."""
    if not health.nonzero or health.histogram is None:
        return ()
    least, most = math.log2(health.amin), math.log2(health.amax)
    inner = (health.quantile_exponent(q) for q in (0.05, 0.5, 0.95))
    # A quantile is known to its binade; its middle is half an exponent up, and never outside the extremes.
    return (least, *(min(max(e + 0.5, least), most) for e in inner if e is not None), most)


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
        "due": sum(update.moved for update in updates),
        "unchanged": sum(update.lost for update in updates),
        "gradient": sum(h.sumsq for h in health),
        "update": sum(update.squared_updates for update in updates),
        "weight": sum(update.squared_values for update in updates),
    }
