"""How the findings of `loss-scale` put scales, windows and skipped steps into words."""

from __future__ import annotations

import math

from ampcheck.core.formats import format_of
from ampcheck.training.scale.stats import LossScaleStats
from ampcheck.training.window import ScaleWindow

_LISTED = 3


def known_window(stats: LossScaleStats) -> ScaleWindow | None:
    """The window, where it says something: gradients of a narrow format, and not all of them zero."""
    if not stats.format or reaches_far(stats.format) or stats.window is None or not stats.window.nonzero:
        return None
    return stats.window


def has_empty_window(stats: LossScaleStats) -> bool:
    """Whether a window is known, and no scale lies in it."""
    window = known_window(stats)
    return window is not None and window.empty


def reaches_far(name: str) -> bool:
    """Whether a format has the range of float32, so that its gradients need no loss scale."""
    return format_of(name).min_exponent <= format_of("float32").min_exponent


def span(window: ScaleWindow) -> str:
    """The scales of a window."""
    if window.low is None or window.high is None:
        return f"no loss scale loses at most {percent(window.share)} of a tensor and overflows nowhere"
    return (
        f"loss scales from {power(window.low)} to {power(window.high)} lose at most {percent(window.share)} of a "
        f"tensor in {window.format} and overflow nowhere"
    )


def reach(stats: LossScaleStats, window: ScaleWindow) -> str:
    """The scales that serve; those that were tried where real backward passes overflow at all of them."""
    if not stats.hopeless:
        return span(window)
    tried = [scale for scale, _, _ in stats.verified]
    return (
        f"real backward passes overflow at every scale that was tried, from {power(min(tried))} to "
        f"{power(max(tried))}, so that what overflows is not the scaled gradients"
    )


def evidence(window: ScaleWindow) -> str:
    """How much a window rests on."""
    return f"{window.nonzero:,} nonzero elements of {len(window.histograms):,} gradients"


def skips(stats: LossScaleStats) -> str:
    """How many steps were skipped, whose gradients were not finite, and in which op that began; empty without one."""
    skipped = [step for step, _, bad in stats.trajectory if bad]
    if not skipped:
        return ""
    ordered = sorted(stats.skipped_by.items(), key=lambda item: (-item[1], item[0]))
    names = [f"{name} ({count}x)" for name, count in ordered[:_LISTED]]
    if more := len(ordered) - _LISTED:
        names += [f"{more} more"] if more > 0 else []
    text = f"; {len(skipped)} of {len(stats.trajectory)} steps were skipped, first step {skipped[0]}"
    text += f", not finite: {', '.join(names)}" if names else ""
    return text + (f", first in {stats.first_op}" if stats.first_op else "")


def nonfinite(window: ScaleWindow) -> str:
    """The elements that are not finite at any scale."""
    name, count = max(window.nonfinite.items(), key=lambda item: item[1])
    others = f" and {len(window.nonfinite) - 1} other tensors" if len(window.nonfinite) > 1 else ""
    return f"{count:,} elements of {name}{others} are infinite or NaN without any scale"


def power(scale: float) -> str:
    """A scale as one reads it: a power of two with its exponent, `2^16`; small ones, and all others, in digits."""
    mantissa, exponent = math.frexp(scale)
    if mantissa == 0.5 and not 1 <= scale <= 1024:
        return f"2^{exponent - 1}"
    return f"{scale:.6g}"


def percent(share: float) -> str:
    """A share in percent."""
    return f"{100 * share:.3g} %"
