"""What the x values of a range chart are: exponents of two, or the values themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ampcheck.report.text import number

Ticks: TypeAlias = "tuple[list[float], list[str]]"
"""Places and their names."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How values become places and names.

    far: what lies further out does not widen the picture. below: what minus infinity stands for. least: the smallest
    margin beside values from low to high. tell: the name of a value. ticks: those of a picture from low to high.
    """

    far: float
    below: str
    least: Callable[[float, float], float]
    tell: Callable[[float], str]
    ticks: Callable[[float, float], Ticks]


def _power(exponent: float) -> str:
    return "2" + number(round(exponent, 1)).translate(str.maketrans("-0123456789.", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹·"))


def _power_ticks(low: float, high: float) -> Ticks:
    step = next((step for step in (1, 2, 4, 8, 16, 32, 64, 128) if (high - low) / step <= 14), 512)
    ticks = range(math.ceil(low / step) * step, math.floor(high) + 1, step)
    return list(map(float, ticks)), [_power(tick) for tick in ticks]


def _plain_ticks(low: float, high: float) -> Ticks:
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(10, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    places = [float(tick) for tick in found if low <= tick <= high]
    digits = next((n for n in range(3, 16) if len({number(place, n) for place in places}) == len(places)), 16)
    return places, [number(place, digits) for place in places]


def _some(low: float, high: float) -> float:
    """A twentieth of what a single value is, so that it stands in the middle of a picture."""
    return (0.05 if low == high else 1e-6) * max(abs(low), abs(high)) or 1.0


SCALES = {
    "exponent": Scale(2000.0, "zero", lambda low, high: 1.0, _power, _power_ticks),  # no float64 lies further out
    "linear": Scale(1e300, "-inf", _some, number, _plain_ticks),
}
"""By the name that a chart says."""
