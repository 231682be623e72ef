"""Tables and charts of a monitored training loop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ampcheck.catalog.training import GRADIENT_UNDERFLOW, LOSS_SCALE
from ampcheck.core.bands import bands_of
from ampcheck.core.formats import FORMATS
from ampcheck.core.limits import Limits
from ampcheck.core.run import Band, Chart, Scalar, Series, Table
from ampcheck.health import TensorHealth
from ampcheck.training.gradients.checks import loss_chart
from ampcheck.training.loss_scale_window import GradientHistogram, ScaleWindow, scale_window
from ampcheck.training.monitor.sums import MonitorStats, ParameterStats

_ROWS = 40
_POINTS = 400


def window_of(stats: MonitorStats, limits: Limits) -> ScaleWindow | None:
    """The loss scales that suit the measured gradients; None without a scaler or a nonzero gradient.

    Gradients that were zero already do not count for its lower end, nor do those of activations.
    """
    if not stats.is_scaled:
        return None
    histograms = {}
    for param, gradient in stats.gradients:
        health = gradient.health
        if health.nonzero and health.histogram is not None:
            # Health counts 2**e <= |g| < 2**(e + 1), a window 2**(b - 1) < |g| <= 2**b: they part at powers of two.
            counts = {exponent + 1: count for exponent, count in health.histogram}
            histograms[param.name] = GradientHistogram(counts, health.amax, health.nonfinite)
    return scale_window(histograms, share=limits.underflow) if histograms else None


def monitor_tables(stats: MonitorStats, limits: Limits) -> tuple[Table, ...]:
    """The gradients and updates by parameter, the worst first, and the optimizers with their scaler."""
    return tuple(table for table in (_parameters(stats), _optimizers(stats, limits)) if table.rows)


def monitor_charts(stats: MonitorStats, limits: Limits) -> tuple[Chart, ...]:
    """The loss scale over its updates, the losses, and the ranges of the gradients."""
    return (*_scale(stats, limits), *loss_chart(stats.subject, stats.losses), *_ranges(stats))


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
    rows = tuple(_row(param, stats.is_scaled) for param in ordered[:_ROWS])
    return Table(f"Gradients and updates: {stats.subject}", columns, rows, str(GRADIENT_UNDERFLOW), note)


def _badness(param: ParameterStats) -> tuple[float, ...]:
    gradient, update = param.gradient, param.update
    zeros = gradient.health.zeros / gradient.health.numel if gradient and gradient.health.numel else 0.0
    unchanged = (update.unchanged_share if update else None) or 0.0
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
        update.update / update.weight if update and update.weight else None,
        update.unchanged_share if update else None,
        max(gradient.calls if gradient else 0, update.calls if update else 0),
    )


def _optimizers(stats: MonitorStats, limits: Limits) -> Table:
    columns = (
        *("optimizer", "steps", "measured", "skipped"),
        *("scale at first", "smallest", "largest", "at last", "window"),
    )
    scales: Sequence[float] = stats.scaler.scales if stats.scaler else ()
    ends = (scales[0], min(scales), max(scales), scales[-1]) if scales else (None,) * 4
    window = window_of(stats, limits)
    text, note = "", ""
    if window is not None:
        text = "none" if window.empty else f"{window.low:g} to {window.high:g}"
        note = (
            f"window: the loss scales at which at most {limits.underflow:.0%} of the gradient of any parameter would "
            "become zero in float16 and nothing overflow; of what was not zero already, and of parameters only"
        )
    rows = tuple(
        (o.name, o.steps, o.measured, len(o.skipped) if o.attempts else None, *ends, text) for o in stats.optimizers
    )
    return Table(f"Optimizer steps: {stats.subject}", columns, rows, str(LOSS_SCALE), note)


def _scale(stats: MonitorStats, limits: Limits) -> Iterator[Chart]:
    scales = stats.scaler.scales if stats.scaler else ()
    if len(scales) < 2:
        return
    corners = [
        i for i in range(len(scales)) if i in (0, len(scales) - 1) or not scales[i - 1] == scales[i] == scales[i + 1]
    ]
    shown = corners[: _POINTS // 2] + corners[-(_POINTS // 2) :] if len(corners) > _POINTS else corners
    levels = tuple(math.log2(scales[i]) if 0 < scales[i] < math.inf else 0.0 for i in shown)
    window = window_of(stats, limits)
    note = f"{stats.skipped:,} of {stats.attempts:,} steps skipped"
    if window is not None and not window.empty:
        note += f"; the window is 2**{window.needed} to 2**{window.allowed}"
    if shown != corners:
        note += f"; {len(corners) - len(shown)} of {len(corners)} turns in the middle are left out"
    yield Chart(
        "line",
        f"Loss scale: {stats.subject}",
        "updates of the scaler",
        "loss scale, as a power of two",
        (Series("loss scale", tuple(map(float, shown)), levels),),
        check=str(LOSS_SCALE),
        note=note,
    )


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
    scale = stats.scaler.scales[-1] if stats.scaler and stats.scaler.scales else 0.0
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
        check=str(GRADIENT_UNDERFLOW),
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
