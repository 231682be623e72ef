"""Numbers of a floating-point format, drawn over its bit patterns, and most often where something happens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
from hypothesis import strategies as st

from ampcheck.errors import UsageError
from ampcheck.formats import FloatFormat, format_of
from ampcheck.strategies.ranked import BETWEEN, PLAINS, sides

if TYPE_CHECKING:
    import torch

_PLAIN, _BETWEEN = st.integers(0, PLAINS - 1), st.integers(0, BETWEEN - 1)


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

    Of each sign are drawn alike: the binades above 256, those below 1, up to 16, up to 256 (in each as often integers
    or powers of two as anything between them), evenly over the range, and, twice as often, where something is notable:
    the ends of the range, zeros, largest and smallest values, both neighbours of every threshold of the format
    (overflow, flush, subnormal, the end of exact integers) and of where squares and `exp` reach one. Of a format beyond
    16 bits the values of float16 and bfloat16, with thresholds, stand beside any of its own.

    min_value, max_value: inclusive. subnormal: whether subnormal values may come. infinity, nan: whether these may; an
    infinity only on a side without a bound. A bound of 0.0 leaves -0.0 out.

    Shrinks to positive values, to integers up to 256 and powers of two, and to where a failure begins: what fails from
    300 on shrinks to 512, and what fails at 300 alone stays. Raises `UsageError` for an empty range, and for infinities
    or NaN in a format without them.
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
    known = sides(fmt, max(low, lowest), min(high, fmt.max), subnormal)
    wide = _any_of(fmt, low, high, subnormal)
    if not known and wide is None:
        raise UsageError(f"{fmt.name} has no value from {low!r} to {high!r}: widen min_value and max_value")
    special = [math.inf] * (infinity and max_value is None) + [-math.inf] * (infinity and min_value is None)
    special += [math.nan] * nan
    branches: list[st.SearchStrategy[float]] = []
    if known:
        sign = st.integers(0, 1) if len(known) > 1 else st.just(0)
        branches.append(st.tuples(sign, _PLAIN, _BETWEEN).map(lambda found: known[found[0]].at(*found[1:])))
    if wide is not None:
        branches = [*branches * 2, wide]
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
