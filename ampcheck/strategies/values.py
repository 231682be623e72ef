"""Numbers of a floating-point format, drawn over its bit patterns, most often near its thresholds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from ampcheck.core.errors import UsageError
from ampcheck.core.formats import FORMATS, FloatFormat, format_of
from ampcheck.strategies.ranked import LISTED_BITS, Side, inner, sides

if TYPE_CHECKING:
    import torch


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
