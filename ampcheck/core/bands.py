"""The ranges of a format on the axis of a chart."""

from __future__ import annotations

import math

from ampcheck.core.charts import Band
from ampcheck.core.formats import FloatFormat


def bands_of(form: FloatFormat, loss_scale: float = 1.0) -> tuple[Band, Band]:
    """The subnormal and the normal range of a format, as powers of two, for values that a loss scale multiplies."""
    name = form.name if loss_scale == 1 else f"{form.name} at scale {loss_scale:g}"
    edges = form.smallest_subnormal, form.smallest_normal, form.max
    least, normal, top = (math.log2(edge) - math.log2(loss_scale) for edge in edges)
    return Band(f"{name} subnormal", least, normal), Band(f"{name} normal", normal, top)
