"""The loss-scale window and the steps of the scaler, as a table and charts."""

from __future__ import annotations

import math

from ampcheck.catalog.training import LOSS_SCALE
from ampcheck.core.run import Band, Chart, Scalar, Series, Table
from ampcheck.training.loss_scale_window import ScaleWindow, is_usable
from ampcheck.training.scale.stats import LossScaleStats, power

_BEYOND = 3
"""Powers of two that are shown beyond each end of the window."""

_ROWS = 48


def loss_scale_table(stats: LossScaleStats) -> Table | None:
    """One row for each power of two around the window, and for what was verified; None without a gradient."""
    window = stats.measured_window
    if window is None:
        return None
    rows: list[tuple[Scalar, ...]] = []
    for scale in _scales(stats, window):
        predicted, real = window.at(scale), stats.measured(scale)
        rows.append(
            (
                power(scale),
                "yes" if window.contains(scale) else "no",
                predicted.lost,
                predicted.tensor if predicted.lost else "",
                predicted.pooled,
                predicted.overflows[0] if predicted.overflows else "no",
                None if real is None else real[0],
                None if real is None else ("yes" if real[1] else "no"),
            )
        )
    columns = (
        "scale", "in the window", "lost, worst tensor", "tensor", "lost, all tensors", "overflows", "measured lost",
        "measured overflow",
    )  # fmt: skip
    note = (
        f"lost: share of the nonzero elements that round to zero in {window.format}, predicted from {window.nonzero:,} "
        f"elements of {len(window.histograms)} unscaled gradients; measured: in real backward passes"
    )
    if stats.scale is not None and is_usable(stats.scale):
        note += f"; in use: {power(stats.scale)}"
    return Table(f"Loss scales: {stats.subject}", columns, rows, LOSS_SCALE.slug, note)


def loss_scale_chart(stats: LossScaleStats) -> Chart | None:
    """log2 of the scale over the steps, with the ends of the window; a skipped step is a stroke downwards."""
    known = [(float(step), math.log2(scale), bad) for step, scale, bad in stats.trajectory if 0 < scale < math.inf]
    if not known:
        return None
    steps = [step for step, _, _ in known]
    series = [Series("scale", steps, [y for _, y, _ in known])]
    ends = (min(steps), max(steps))
    window = stats.measured_window
    if window is not None:
        series.append(Series("largest that overflows nowhere", ends, (float(window.allowed),) * 2, "window"))
        series.append(Series("smallest that loses little", ends, (float(window.needed),) * 2, "window"))
    skipped = [(step, y) for step, y, bad in known if bad]
    if skipped:
        x = [step for step, _ in skipped for _ in range(3)][:-1]  # a gap parts one stroke from the next
        strokes = [value for _, y in skipped for value in (y, y - 1, math.nan)][:-1]
        series.append(Series("skipped step", x, strokes, "skipped"))
    title = f"Loss scale over the steps: {stats.subject}"
    note = "between the two lines of the window no tensor loses more than the share, and none overflows"
    return Chart(
        "line", title, "step", "log2 of the loss scale", series, check=LOSS_SCALE.slug, note=note if window else ""
    )


def window_chart(stats: LossScaleStats) -> Chart | None:
    """The share lost over log2 of the scale, predicted and measured, with the window as a band."""
    window = stats.measured_window
    if window is None:
        return None
    scales = _scales(stats, window)
    x = [math.log2(scale) for scale in scales]
    predicted = [window.at(scale) for scale in scales]
    series = [
        Series("worst tensor", x, [at.lost for at in predicted]),
        Series("all tensors", x, [at.pooled for at in predicted]),
    ]
    if real := [(math.log2(scale), lost) for scale, lost, overflows in stats.verified if not overflows]:
        series.append(Series("worst tensor", [at for at, _ in real], [lost for _, lost in real], "measured"))
    if stats.scale is not None and is_usable(stats.scale):
        series.append(Series("scale in use", (math.log2(stats.scale),) * 2, (0.0, 1.0), "in use"))
    bands = () if window.empty else (Band("window", float(window.needed), float(window.allowed)),)
    title = f"Gradients lost at each loss scale: {stats.subject}"
    note = f"above 2^{window.allowed} {window.allowed_by or 'a gradient'} overflows in {window.format}"
    return Chart("line", title, "log2 of the loss scale", "share lost", series, bands, LOSS_SCALE.slug, note)


def _scales(stats: LossScaleStats, window: ScaleWindow) -> list[float]:
    """Powers of two around both ends, thinned out between ends far apart, the verified ones and the one in use."""
    ends = (window.needed, window.allowed)
    between = range(max(min(ends) - _BEYOND, -1022), min(max(ends) + _BEYOND, 1023) + 1)
    stride = math.ceil(len(between) / _ROWS)
    exponents = {e for e in between if e % stride == 0 or min(abs(e - end) for end in ends) <= _BEYOND}
    scales = {math.ldexp(1.0, e) for e in exponents} | {scale for scale, _, _ in stats.verified}
    in_use = {stats.scale} if stats.scale is not None and is_usable(stats.scale) else set()
    return sorted(scales | in_use)
