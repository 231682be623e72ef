"""Numbers of a floating-point format, drawn over its bit patterns, and most often where something happens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ampcheck.errors import UsageError
from ampcheck.formats import FORMATS, FloatFormat, format_of

if TYPE_CHECKING:
    import torch

NARROW = ("float16", "bfloat16")
"""What autocast casts to: their thresholds matter for wider inputs too."""

_LISTED_BITS = 16  # a format of so many bits is listed value by value
_BYTE = st.integers(0, 255)
_GRID = 256
_INTEGERS = 1 << 16
_EDGES = 8  # one in so many notable values is an end of the range


def values(
    dtype: torch.dtype | str | FloatFormat,
    *,
    min_value: float | None = None,
    max_value: float | None = None,
    subnormal: bool = True,
    infinity: bool = False,
    nan: bool = False,
) -> st.SearchStrategy[float]:
    """Python floats that the format holds exactly.

    Drawn from alike are: integers below 256, positive and negative; powers of two; multiples of 1/8 up to 16; an even
    grid over the range; all bit patterns, which is uniform in the exponent; and, twice as often, what is notable: the
    ends of the range, zeros, largest and smallest values, both neighbours of every threshold of the format (overflow,
    flush, subnormal, the end of exact integers) and of where squares and `exp` reach one. Of a format beyond 16 bits
    the values of float16 and bfloat16, with thresholds, stand beside any of its own.

    min_value, max_value: inclusive. subnormal: whether subnormal values may come. infinity, nan: whether these may; an
    infinity only on a side without a bound.

    Shrinks to small non-negative integers, then negative ones, powers of two, and few significant bits. Raises
    `UsageError` for an empty range, and for infinities or NaN in a format without them.
    """
    fmt = format_of(dtype)
    lowest = -fmt.max if fmt.signed else (0.0 if fmt.has_subnormals else fmt.smallest_normal)
    low = lowest if min_value is None else float(min_value)
    high = fmt.max if max_value is None else float(max_value)
    if not (low <= high and math.isfinite(low) and math.isfinite(high)):
        raise UsageError(f"values need finite bounds with min_value <= max_value; found {min_value} and {max_value}")
    if infinity and not fmt.has_inf:
        raise UsageError(f"{fmt.name} has no infinities; infinity=True was asked for")
    if nan and fmt.nan == "none":
        raise UsageError(f"{fmt.name} has no NaN; nan=True was asked for")
    known = _pool(fmt, max(low, lowest), min(high, fmt.max), subnormal)
    wide = _any_of(fmt, low, high, subnormal)
    if not len(known.ordered) and wide is None:
        raise UsageError(f"{fmt.name} has no value from {low!r} to {high!r}: widen min_value and max_value")
    special = [math.inf] * (infinity and max_value is None) + [-math.inf] * (infinity and min_value is None)
    special += [math.nan] * nan
    branches: list[st.SearchStrategy[float]] = []
    if len(known.ordered):
        # Hypothesis makes the numbers smaller, and smaller stands for simpler. Only up to 255 does it draw them evenly.
        branches.append(st.tuples(st.integers(0, len(known.sections) - 1), _BYTE, _BYTE).map(known.at))
    if wide is not None:
        branches.append(wide)
    if special:
        branches.append(st.sampled_from(special))
    return st.one_of(branches)


def _any_of(fmt: FloatFormat, low: float, high: float, subnormal: bool) -> st.SearchStrategy[float] | None:
    """Any float32 or float64 between the bounds; None where there is none, and for formats that are listed."""
    if fmt.name not in ("float32", "float64"):
        return None
    width: Literal[32, 64] = 32 if fmt.name == "float32" else 64
    kind = np.float32 if width == 32 else np.float64
    least, most = kind(low), kind(high)
    least = np.nextafter(least, kind(np.inf)) if float(least) < low else least
    most = np.nextafter(most, kind(-np.inf)) if float(most) > high else most
    edges = float(least), float(most)
    if edges[0] > edges[1]:
        return None
    if not subnormal and not any(edge == 0 or abs(edge) >= fmt.smallest_normal for edge in edges):
        return None
    return st.floats(*edges, width=width, allow_subnormal=None if subnormal else False)


@dataclass(frozen=True, slots=True)
class _Pool:
    """ordered: every value once, the simplest first. sections: drawn from alike, each with its simplest value first."""

    ordered: NDArray[np.float64]
    sections: tuple[NDArray[np.float64], ...]

    def at(self, place: tuple[int, int, int]) -> float:
        section, low, high = place
        chosen = self.sections[section]
        # The low byte alone points into short sections, so that it keeps its meaning when the section gets simpler.
        return float(chosen[(low + (high << 8 if len(chosen) > 1 << 8 else 0)) % len(chosen)])


@lru_cache(maxsize=64)
def _pool(fmt: FloatFormat, low: float, high: float, subnormal: bool) -> _Pool:
    def within(found: NDArray[np.float64]) -> NDArray[np.float64]:
        kept = found[(found >= low) & (found <= high)]
        if not subnormal:
            kept = kept[(kept == 0) | (np.abs(kept) >= fmt.smallest_normal)]
        return kept

    listed = [fmt] if fmt.bits <= _LISTED_BITS else [FORMATS[name] for name in NARROW]
    magnitudes = np.unique(np.concatenate([_magnitudes(one) for one in listed]))
    magnitudes = magnitudes[magnitudes <= fmt.max]
    every = np.concatenate([magnitudes, -magnitudes[magnitudes > 0]]) if fmt.signed else magnitudes
    notable = np.array(sorted(set(_notable(fmt))), dtype=np.float64)
    if fmt.signed:
        notable = np.concatenate([notable, -notable])  # -0.0 among them
    ends = _rounded(fmt, np.array([low, high]))
    ordered = within(np.concatenate([every, notable[~np.isin(notable, every)], notable[notable == 0][1:]]))
    ordered = _simplest_first(ordered)
    if not len(ordered):
        return _Pool(ordered, ())
    whole = ordered[(ordered == np.floor(ordered)) & (np.abs(ordered) < 1 << 8)]
    share = np.linspace(0.0, 1.0, _GRID)
    with np.errstate(over="ignore"):  # at the largest value a sum of both parts may round beyond it
        even = np.clip(low * (1 - share) + high * share, low, high)
    grid = within(_rounded(fmt, even))
    ordinary = within(_rounded(fmt, np.arange(-_GRID // 2, _GRID // 2) / 8.0))
    # The ends of the range take a part of a section of their own, whatever else is notable.
    edges = np.tile(within(ends), max(1, len(notable) // _EDGES))
    positive, negative = whole[~np.signbit(whole)], whole[np.signbit(whole)]
    powers = ordered[np.abs(np.frexp(ordered)[0]) == 0.5]
    places = np.concatenate([within(notable), edges])
    found = (positive, negative, places, powers, ordinary, grid, places, ordered)
    return _Pool(ordered, tuple(_simplest_first(part) if len(part) else ordered for part in found))


def _magnitudes(fmt: FloatFormat) -> NDArray[np.float64]:
    """Every finite non-negative value, from the parameters of the format."""
    codes = np.arange(fmt.encode(fmt.max) + 1)
    exponent, mantissa = codes >> fmt.mantissa_bits, (codes & ((1 << fmt.mantissa_bits) - 1)).astype(np.float64)
    below = (exponent == 0) & fmt.has_subnormals
    significand = np.where(below, mantissa, mantissa + 2.0**fmt.mantissa_bits)
    power = np.where(below, fmt.min_exponent, exponent - fmt.bias) - fmt.mantissa_bits
    found: NDArray[np.float64] = np.ldexp(significand, power)
    return found


def _simplest_first(found: NDArray[np.float64]) -> NDArray[np.float64]:
    """Integers, then powers of two, then the fewest significant bits.

    Each kind holds the positive ones first and those below 1 last: what one inequality asks for then lies together, and
    Hypothesis comes down to its simplest.
    """
    size = np.abs(found)
    fraction, exponent = np.frexp(size)
    scaled = np.ldexp(fraction, 53).astype(np.int64)
    bits = 53 - np.log2(np.maximum(scaled & -scaled, 1)).astype(np.int64)
    whole = (size == np.floor(size)) & (size <= _INTEGERS)
    kind = np.where(whole, 0, np.where(bits == 1, 1, 2))
    negative, below, binade = np.signbit(found), (size < 1) & (size > 0), np.abs(exponent - 1)
    second = np.where(kind == 0, size, np.where(kind == 1, binade, bits))
    simplest: NDArray[np.float64] = found[np.lexsort((binade, second, below, negative, kind))]
    return simplest


def _notable(fmt: FloatFormat) -> Iterator[float]:
    """Magnitudes at which something changes, in the format itself or in one that its values are cast to."""
    yield 0.0
    narrow = [FORMATS[name] for name in NARROW] if fmt.bits > _LISTED_BITS else []
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


def _rounded(fmt: FloatFormat, found: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.unique([fmt.round(float(x), saturate=True) for x in found if fmt.signed or x >= 0] or [fmt.max])
