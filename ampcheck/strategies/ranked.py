"""The values of a format in the order in which a failing example is made simpler, and how often each is drawn.

Hypothesis makes the numbers that it chose smaller. So a value is chosen by its sign, by the next plain number beyond it
(an integer up to 256 or a power of two: zero, from 1 upwards, then from 1 downwards), and by what lies between that and
the plain one before. What fails from some magnitude on fails at plain numbers as well, down to where it begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ampcheck.formats import FORMATS, FloatFormat

NARROW = ("float16", "bfloat16")
"""What autocast casts to: their thresholds matter for wider inputs too."""

LISTED_BITS = 16
"""A format of so many bits is listed value by value."""

PLAINS = 1 << 10
"""Numbers from which a plain number is drawn; how many lead to one is how often it comes. Hypothesis favours small
numbers, the more the larger the range is: about twice over this one."""

BETWEEN = 1 << 12
"""Numbers from which a value between two plain ones is drawn: first the plain one itself, what is notable, the rest."""

_GRID = 256
_WHOLE = 256
_SMALL = 16

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Side:
    """The values of one sign.

    groups: for each plain number, in order, itself, what is notable before it, and the rest before it with the fewest
    significant bits first; without empty parts. upto: cumulated shares of `PLAINS`.
    """

    groups: tuple[tuple[Values, ...], ...]
    upto: NDArray[np.int64]

    @property
    def ordered(self) -> Values:
        """Every value."""
        return np.concatenate([part for group in self.groups for part in group])

    def at(self, plain: int, between: int) -> float:
        """The value of two numbers, below `PLAINS` and `BETWEEN`."""
        group = self.groups[int(np.searchsorted(self.upto, plain, side="right"))]
        part, within = divmod(between * len(group), BETWEEN)
        return float(group[part][within * len(group[part]) // BETWEEN])


@lru_cache(maxsize=64)
def sides(fmt: FloatFormat, low: float, high: float, subnormal: bool) -> tuple[Side, ...]:
    """The non-negative values from `low` to `high`, then the negative ones, where there are any.

    Of a format beyond 16 bits those of float16 and bfloat16, and its own thresholds.
    """
    found = []
    listed = [fmt] if fmt.bits <= LISTED_BITS else [FORMATS[name] for name in NARROW]
    every = np.unique(np.concatenate([magnitudes(one) for one in listed]))
    known = np.array(sorted(set(_notable(fmt))), dtype=np.float64)
    for sign in (1, -1) if fmt.signed else (1,):
        least, most = (max(low, 0.0), high) if sign > 0 else (max(-high, 0.0), -low)
        # Zero alone makes no side beside another: 0.0 is no bound of -0.0, and one of both comes below a bound of zero.
        if most < least or (most == 0 and (sign < 0 or low < 0)):
            continue

        def within(values: Values, least: float = least, most: float = most) -> Values:
            kept = values[(values >= least) & (values <= min(most, fmt.max))]
            return kept if subnormal else kept[(kept == 0) | (kept >= fmt.smallest_normal)]

        share = np.linspace(0.0, 1.0, _GRID)
        # Both parts of an end are rounded: what that adds beyond the range is clipped.
        with np.errstate(over="ignore"):
            even = within(_rounded(fmt, np.clip(least * (1 - share) + most * share, least, most)))
        notable = np.union1d(within(known), even[[0, -1]] if least and len(even) else even[-1:])
        size = np.unique(np.concatenate([within(every), even, notable]))
        if len(size):
            zero = 0.0 if sign > 0 or high == 0 else -0.0
            found.append(_side(size, even, notable, sign, zero))
    return tuple(found)


def _side(size: Values, even: Values, notable: Values, sign: int, zero: float) -> Side:
    """size: the sorted magnitudes of the side. even: an even grid of them. notable: those to be drawn more often."""
    below = size[(size > 0) & (size < 1)][::-1]
    groups: list[tuple[Values, ...]] = [(np.array([zero]),)] if size[0] == 0 else []
    numbers = [0.0] * len(groups)
    for block in (size[size >= 1], below):
        plain = np.flatnonzero(_is_plain(block))
        ends = np.union1d(plain, len(block) - 1) if len(block) else plain
        for first, last in zip([0, *(ends[:-1] + 1)], ends, strict=len(ends) > 0):
            between = block[first:last]
            marked = np.isin(between, notable)
            rest = between[~marked]
            # What is notable stands there twice, to be drawn as often as all others together.
            parts = (block[last : last + 1], *[between[marked]] * 2, rest[np.argsort(_bits(rest), kind="stable")])
            groups.append(tuple(sign * part for part in parts if len(part)))
            numbers.append(float(block[last]))
    # Alike: what lies in the binades above and below, what is small, integers, what is notable, and the range evenly.
    shares = np.zeros(len(groups))
    number = np.array(numbers)
    small, whole = number[number <= _SMALL], number[number <= _WHOLE]
    for part in (number[number > _WHOLE], number[number < 1], small, whole, notable, notable, even):
        if len(part):
            np.add.at(shares, _group_of(number, part), 1 / len(part))
    places = np.maximum(1, np.floor(shares / shares.sum() * (PLAINS - len(groups)))) if len(groups) < PLAINS else shares
    return Side(tuple(groups), np.ceil(np.cumsum(places) / places.sum() * PLAINS).astype(np.int64))


def magnitudes(fmt: FloatFormat) -> Values:
    """Every finite non-negative value, from the parameters of the format."""
    codes = np.arange(fmt.encode(fmt.max) + 1)
    exponent, mantissa = codes >> fmt.mantissa_bits, (codes & ((1 << fmt.mantissa_bits) - 1)).astype(np.float64)
    below = (exponent == 0) & fmt.has_subnormals
    significand = np.where(below, mantissa, mantissa + 2.0**fmt.mantissa_bits)
    power = np.where(below, fmt.min_exponent, exponent - fmt.bias) - fmt.mantissa_bits
    found: Values = np.ldexp(significand, power)
    return found


def _group_of(number: Values, part: Values) -> NDArray[np.int64]:
    """The group in which each value lies: `number` is 0, then rises from 1, then falls."""
    rise = number[(number >= 1)]
    first = int((number == 0).sum())
    fall = number[first + len(rise) :]
    up = first + np.minimum(np.searchsorted(rise, part), max(0, len(rise) - 1))
    down = first + len(rise) + np.searchsorted(-fall, -part)
    return np.where(part == 0, 0, np.where(part >= 1, up, np.minimum(down, len(number) - 1)))


def _is_plain(size: Values) -> NDArray[np.bool_]:
    return np.asarray((np.frexp(size)[0] == 0.5) | ((size == np.floor(size)) & (size <= _WHOLE)))


def _bits(size: Values) -> NDArray[np.int64]:
    """Significant bits of each value; none of zero."""
    scaled = np.ldexp(np.frexp(size)[0], 53).astype(np.int64)
    return np.where(size == 0, 0, 53 - np.log2(np.maximum(scaled & -scaled, 1)).astype(np.int64))


def _notable(fmt: FloatFormat) -> Iterator[float]:
    """Magnitudes at which something changes, in the format itself or in one that its values are cast to."""
    yield 0.0
    narrow = [FORMATS[name] for name in NARROW] if fmt.bits > LISTED_BITS else []
    for one in (fmt, *narrow):
        limits = [one.max, one.smallest_normal, one.smallest_subnormal, float(one.largest_exact_integer), one.eps, 1.0]
        limits += [one.flushes_at, one.subnormal_below, one.overflows_at, one.unit_roundoff]
        for limit in limits:
            if math.isfinite(limit) and limit > 0:
                # A square, or a product of two alike, reaches the limit at the root; exp and its inverse at the log.
                for place in (limit, math.sqrt(limit), abs(math.log(limit)) or 1.0):
                    yield from _around(fmt, place)


def _around(fmt: FloatFormat, place: float) -> Iterator[float]:
    """The value of the format nearest to `place`, and both its neighbours."""
    code, largest = fmt.encode(min(place, fmt.max)), fmt.encode(fmt.max)
    for near in (code - 1, code, code + 1):
        if 0 <= near <= largest:
            yield fmt.decode(near)


def _rounded(fmt: FloatFormat, found: Values | tuple[float, ...]) -> Values:
    near = np.unique([fmt.round(float(x), saturate=True) for x in found])
    return near.astype(np.float64)
