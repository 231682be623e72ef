"""Numbers of a floating-point format, drawn over its bit patterns, most often near its thresholds.

Hypothesis shrinks the numbers that it drew. So a value is chosen by its sign, by the next plain number beyond it (an
integer up to 256 or a power of two: zero, from 1 upwards, then from 1 downwards), and by its position between that and
the previous plain number. A failure from some magnitude on also occurs at plain numbers, down to where it begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ampcheck.core.arguments import LOW
from ampcheck.core.errors import UsageError
from ampcheck.core.formats import FORMATS, FloatFormat, format_of

if TYPE_CHECKING:
    import torch

LISTED_BITS = 19
"""Formats of up to so many bits, TF32 among them, are listed value by value."""

_CAST_BITS = 16
"""Above so many bits, values are cast to the narrow formats, whose thresholds matter then too."""

_EACH = 8
"""Drawn numbers for each plain number, on average: how many it has is how often it comes."""

_GRID = 256
_WHOLE = 256
_SMALL = 16

Floats = NDArray[np.float64]


def values(
    dtype: torch.dtype | str | FloatFormat,
    *,
    min_value: float | None = None,
    max_value: float | None = None,
    subnormal: bool = True,
    infinity: bool = False,
    nan: bool = False,
) -> st.SearchStrategy[float]:
    """Python floats that the format represents exactly.

    For each sign these are drawn equally often: the binades above 256, those below 1, up to 16, up to 256 (in each as
    often integers or powers of two as anything between them), evenly over the range, and, twice as often, notable
    values: the ends of the range, zeros, largest and smallest values, both neighbours of every threshold of the format
    (overflow, flush, subnormal, the end of exact integers) and of the arguments at which squares and `exp` reach one.
    Every value can come. Beyond 16 bits the thresholds of float16 and bfloat16 are notable too. Beyond the 19 bits of
    TF32 two draws of three give values of those two formats, with the notable values and an even grid of the format's
    own; the third gives any value, as `floats` of Hypothesis draws it.

    min_value, max_value: inclusive. subnormal: whether subnormal values may come. infinity, nan: whether these may; an
    infinity only on a side without a bound. -0.0 comes where values of both signs do, if the format has it: a bound of
    0.0 or -0.0 excludes it.

    Shrinks to positive values, to integers up to 256 and powers of two, and to where a failure begins: a failure from
    300 on shrinks to 512, and one at 300 alone stays. Raises `UsageError` for an empty range, and for infinities or NaN
    in a format without them.
    """
    fmt = format_of(dtype)
    lowest = -fmt.max if fmt.signed else (0.0 if fmt.has_subnormals else fmt.smallest_normal)
    low = lowest if min_value is None else float(min_value)
    high = fmt.max if max_value is None else float(max_value)
    if not (low <= high and math.isfinite(low) and math.isfinite(high)):
        raise UsageError(f"values need finite bounds with min_value <= max_value; found {min_value} and {max_value}")
    if infinity and not fmt.has_inf:
        raise UsageError(f"{fmt.name} has no infinities; leave infinity=True out")
    if nan and fmt.nan == "none":
        raise UsageError(f"{fmt.name} has no NaN; leave nan=True out")
    ends = inner(fmt, low, high, subnormal)
    if ends is None:
        raise UsageError(f"{fmt.name} has no value from {low!r} to {high!r}: widen min_value and max_value")
    special = [math.inf] * (infinity and max_value is None) + [-math.inf] * (infinity and min_value is None)
    special += [math.nan] * nan
    branches: list[st.SearchStrategy[float]] = [_known(sides(fmt, *ends, subnormal))]
    if fmt.bits > LISTED_BITS:
        branches = [*branches * 2, _any_of(fmt, *ends, subnormal)]
    if special:
        branches.append(st.sampled_from(special))
    return st.one_of(branches)


def _known(known: Sequence[Side]) -> st.SearchStrategy[float]:
    @st.composite
    def drawn(draw: st.DrawFn) -> float:  # no argument: Hypothesis would print all values
        side = known[draw(_below(len(known)))] if len(known) > 1 else known[0]
        plain = draw(_below(side.plains))
        # Two at least: a number is always drawn here, so that one plain number can take another's place.
        between = draw(_below(max(2, side.betweens(plain))))
        return side.at(plain, min(between, side.betweens(plain) - 1))

    return drawn()


@lru_cache(maxsize=4096)
def _below(count: int) -> st.SearchStrategy[int]:
    return st.integers(0, count - 1)


def _any_of(fmt: FloatFormat, low: float, high: float, subnormal: bool) -> st.SearchStrategy[float]:
    """Any value of the format between two of its values."""
    if fmt == FORMATS["float32"]:
        floats = st.floats(low, high, width=32, allow_subnormal=None if subnormal else False)
    else:
        floats = st.floats(low, high).map(fmt.round)  # rounding is monotonic: the results are in the range too
        floats = floats if subnormal else floats.filter(lambda x: x == 0 or abs(x) >= fmt.smallest_normal)
    return floats if low < 0 < high else floats.map(lambda x: x + 0.0)  # adding 0.0 makes -0.0 positive


@dataclass(frozen=True, slots=True)
class Side:
    """The values of one sign.

    groups: for each plain number, in order, itself, the notable values before it, and the others before it with the
    fewest significant bits first; without empty parts. upto: how many drawn numbers give a group or an earlier one:
    each has at least one.
    """

    groups: tuple[tuple[Floats, ...], ...]
    upto: NDArray[np.int64]

    @property
    def plains(self) -> int:
        """Number of drawn numbers that choose a plain number."""
        return int(self.upto[-1])

    def betweens(self, plain: int) -> int:
        """Return how many drawn numbers choose a value of a plain number's group: enough for each."""
        group = self._group(plain)
        return len(group) * max(map(len, group))

    def at(self, plain: int, between: int) -> float:
        """The value of two drawn numbers, below `plains` and `betweens(plain)`: each part equally often."""
        group = self._group(plain)
        longest = max(map(len, group))
        part, within = divmod(between, longest)
        return float(group[part][within * len(group[part]) // longest])

    def _group(self, plain: int) -> tuple[Floats, ...]:
        return self.groups[int(np.searchsorted(self.upto, plain, side="right"))]


def inner(fmt: FloatFormat, low: float, high: float, subnormal: bool) -> tuple[float, float] | None:
    """The first and the last value of the format from `low` to `high`; None where there is none. No zero is -0.0."""

    def up(size: float) -> float:
        """The least value from a magnitude on; infinity where there is none."""
        if size > fmt.max:
            return math.inf
        code = fmt.encode(size)
        near = fmt.decode(code + (fmt.decode(code) < size))
        return near if subnormal or near == 0 else max(near, fmt.smallest_normal)

    def down(size: float) -> float | None:
        """The greatest value up to a magnitude; None where there is none."""
        code = fmt.encode(min(size, fmt.max))
        code -= fmt.decode(code) > size
        if code < 0:
            return None
        near = fmt.decode(code)
        return near if subnormal or near >= fmt.smallest_normal else 0.0

    negative = down(-low) if low <= 0 and fmt.signed else None
    positive = down(high) if high >= 0 else None
    first = up(max(low, 0.0)) if negative is None else -negative
    last = positive if positive is not None else -up(max(-high, 0.0)) if fmt.signed else -math.inf
    # Adding 0.0 makes -0.0 positive.
    return (first + 0.0, last + 0.0) if first <= last else None


@lru_cache(maxsize=64)
def sides(fmt: FloatFormat, low: float, high: float, subnormal: bool) -> tuple[Side, ...]:
    """The non-negative values from `low` to `high`, two values of the format (see `inner`), then the negative ones.

    Of a format beyond `LISTED_BITS` those of float16 and bfloat16, its own thresholds, and an even grid.
    """
    listed = [fmt] if fmt.bits <= LISTED_BITS else [FORMATS[name] for name in LOW]
    every = np.unique(np.concatenate([magnitudes(format) for format in listed]))
    every = every[_representable(fmt, every)]
    thresholds = np.array(sorted(set(_notable(fmt))), dtype=np.float64)
    smallest = 0.0 if fmt.has_subnormals else fmt.smallest_normal
    several = []
    for sign in (1, -1) if fmt.signed else (1,):
        least, most = (max(low, smallest), high) if sign > 0 else (max(-high, smallest), -low)
        # Zero alone is no second side: 0.0 is no bound of -0.0, and one of both comes below a bound of zero.
        if most < least or (most == 0 and (sign < 0 or low < 0)):
            continue

        def within(values: Floats, least: float = least, most: float = most) -> Floats:
            values = values[(values >= least) & (values <= most)]
            return values if subnormal else values[(values == 0) | (values >= fmt.smallest_normal)]

        share = np.linspace(0.0, 1.0, _GRID)
        with np.errstate(over="ignore"):  # both summands are rounded: a sum beyond the range is clipped
            grid = np.clip(least * (1 - share) + most * share, least, most)
        even = within(np.unique([fmt.round(float(x), saturate=True) for x in grid]))
        notable = np.union1d(within(thresholds), [least, most])
        size = np.unique(np.concatenate([within(every), even, notable]))
        zero = -0.0 if sign < 0 and high > 0 and fmt.nan != "negative-zero" else 0.0
        several.append(_side(size, even, notable, sign, zero))
    return tuple(several)


def _side(size: Floats, even: Floats, notable: Floats, sign: int, zero: float) -> Side:
    """size: the sorted magnitudes of the side. even: an even grid of them. notable: drawn more often."""
    below = size[(size > 0) & (size < 1)][::-1]
    groups: list[tuple[Floats, ...]] = [(np.array([zero]),)] if size[0] == 0 else []
    numbers = [0.0] * len(groups)
    for block in (size[size >= 1], below):
        is_plain = (np.frexp(block)[0] == 0.5) | ((block == np.floor(block)) & (block <= _WHOLE))
        plain = np.flatnonzero(is_plain)
        ends = np.union1d(plain, len(block) - 1) if len(block) else plain
        for first, last in zip([0, *(ends[:-1] + 1)], ends, strict=len(ends) > 0):
            between = block[first:last]
            marked = np.isin(between, notable)
            rest = between[~marked]
            # Notable values are listed twice, to be drawn as often as all others together.
            parts = (block[last : last + 1], *[between[marked]] * 2, rest[np.argsort(_bits(rest), kind="stable")])
            groups.append(tuple(sign * part for part in parts if len(part)))
            numbers.append(float(block[last]))
    # Equal shares: binades above and below, small numbers, integers, notable values (twice), and the range evenly.
    shares = np.zeros(len(groups))
    number = np.array(numbers)
    small, whole = number[number <= _SMALL], number[number <= _WHOLE]
    for part in (number[number > _WHOLE], number[number < 1], small, whole, notable, notable, even):
        if len(part):
            np.add.at(shares, _group_of(number, part), 1 / len(part))
    spare = (_EACH - 1) * len(groups)
    counts = np.maximum(1, np.floor(shares / shares.sum() * spare)).astype(np.int64)
    return Side(tuple(groups), np.cumsum(counts))


def magnitudes(fmt: FloatFormat) -> Floats:
    """Every finite non-negative value, from the parameters of the format."""
    codes = np.arange(fmt.encode(fmt.max) + 1)
    exponent, mantissa = codes >> fmt.mantissa_bits, (codes & ((1 << fmt.mantissa_bits) - 1)).astype(np.float64)
    below = (exponent == 0) & fmt.has_subnormals
    significand = np.where(below, mantissa, mantissa + 2.0**fmt.mantissa_bits)
    power = np.where(below, fmt.min_exponent, exponent - fmt.bias) - fmt.mantissa_bits
    return np.asarray(np.ldexp(significand, power))


def _representable(fmt: FloatFormat, size: Floats) -> NDArray[np.bool_]:
    """Which magnitudes have no more significant bits than the format; its range is not checked."""
    units = np.ldexp(size, fmt.mantissa_bits - np.maximum(np.frexp(size)[1] - 1, fmt.min_exponent))
    return np.asarray(units == np.floor(units))


def _group_of(number: Floats, part: Floats) -> NDArray[np.int64]:
    """The group of each value: `number` is 0, then rises from 1, then falls."""
    rise = number[number >= 1]
    first = int((number == 0).sum())
    fall = number[first + len(rise) :]
    up = first + np.minimum(np.searchsorted(rise, part), max(0, len(rise) - 1))
    down = first + len(rise) + np.searchsorted(-fall, -part)
    return np.where(part == 0, 0, np.where(part >= 1, up, np.minimum(down, len(number) - 1)))


def _bits(size: Floats) -> NDArray[np.int64]:
    """Significant bits of each value; none of zero."""
    scaled = np.ldexp(np.frexp(size)[0], 53).astype(np.int64)
    return np.where(size == 0, 0, 53 - np.log2(np.maximum(scaled & -scaled, 1)).astype(np.int64))


def _notable(fmt: FloatFormat) -> Iterator[float]:
    """Magnitudes at which something changes, in the format itself or in one that its values are cast to."""
    yield 0.0
    largest = fmt.encode(fmt.max)
    for each in (fmt, *(FORMATS[name] for name in LOW if fmt.bits > _CAST_BITS)):
        limits = [each.max, each.smallest_normal, each.smallest_subnormal, float(each.largest_exact_integer), each.eps]
        limits += [1.0, each.flushes_at, each.subnormal_below, each.overflows_at, each.unit_roundoff]
        for limit in limits:
            if not 0 < limit < math.inf:
                continue
            # A square, or a product of two alike, reaches the limit at the root; exp and its inverse at the log.
            for size in (limit, math.sqrt(limit), abs(math.log(limit)) or 1.0):
                code = fmt.encode(min(size, fmt.max))
                yield from (fmt.decode(near) for near in (code - 1, code, code + 1) if 0 <= near <= largest)
