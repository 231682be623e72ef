"""Axes: where a value lies on one, and its labelled ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ampcheck.report.text import number

DRAWABLE = 1e300
"""Larger values are drawn as infinite."""

_NOTHING = 1e-290
"""An axis that is shorter cannot be divided into ticks."""

_LEAST = 5e-324
"""The smallest number of float64."""


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from `low` to `high`, which differ.

    kind: `linear`, `exponent` (a value is an exponent of two) or `log`. whole: only whole numbers have ticks.
    """

    low: float
    high: float
    kind: str = "linear"
    whole: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, as a share of the axis; beyond its ends at the ends."""
        low, high = self._along(self.low), self._along(self.high)
        return min(max((self._along(value) - low) / (high - low), 0.0), 1.0)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Rising positions, as shares of the axis, with their labels; about `most` of them at most."""
        values = {"exponent": self._powers_of_two, "log": self._powers_of_ten, "linear": self._plain}[self.kind](most)
        digits = next((n for n in range(3, 16) if len({number(v, n) for v in values}) == len(values)), 16)
        return [(self.share(v), power_of_two(v) if self.kind == "exponent" else number(v, digits)) for v in values]

    def _along(self, value: float) -> float:
        if self.kind != "log":
            return min(max(value, -DRAWABLE), DRAWABLE)
        return math.log10(value) if value > 0 else -400.0

    def _powers_of_two(self, most: int) -> list[float]:
        step = next((s for s in (1, 2, 4, 8, 16, 32, 64, 128) if (self.high - self.low) / s <= most), 512)
        return [float(t) for t in range(math.ceil(self.low / step) * step, math.floor(self.high) + 1, step)]

    def _powers_of_ten(self, most: int) -> list[float]:
        low, high = math.log10(self.low), math.log10(self.high)
        step = max(1, math.ceil((high - low) / most))
        ticks = [10.0**e for e in range(math.ceil(low / step) * step, math.floor(high) + 1, step)]
        return ticks if len(ticks) > 1 else self._plain(most)

    def _plain(self, most: int) -> list[float]:
        size = 10.0 ** math.floor(math.log10((self.high - self.low) / most))
        factors = (1.0, 2.0, 5.0, 10.0) if self.whole else (1.0, 2.0, 2.5, 5.0, 10.0)
        step = next((f * size for f in factors if (self.high - self.low) / (f * size) <= most), 10.0 * size)
        step = max(step, 1.0) if self.whole else step
        ticks = (n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1))
        return [0.0 if abs(tick) < 1e-9 * step else tick for tick in ticks]


def power_of_two(exponent: float) -> str:
    """`2⁻¹⁴`."""
    return "2" + number(round(exponent, 1)).translate(str.maketrans("-0123456789.", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹·"))


def scale_over(values: Iterable[float], kind: str, *, margin: float = 0.0, whole: bool = False) -> Scale:
    """The axis that shows all finite values, of a log axis all positive ones. margin: a share of it at both ends."""
    shown = [v for v in values if abs(v) < DRAWABLE and (kind != "log" or v > 0)]
    low, high = (min(shown), max(shown)) if shown else (1.0, 10.0)
    if kind == "log":
        near = math.log10(high) - math.log10(low) < 1e-9
        return Scale(max(low / 2, _LEAST), high * 2, kind) if near else Scale(low, high, kind)
    if high - low <= max(1e-12 * max(abs(low), abs(high)), _NOTHING):
        unit = whole or kind == "exponent" or abs(high) <= _NOTHING
        room = max(1.0, 1e-6 * abs(high)) if unit else 0.05 * abs(high)
        return Scale(low - room, high + room, kind, whole)
    room = margin * (high - low)
    return Scale(low - room, high + room, kind, whole)
