"""Formats on any number that a wider format holds; exact fractions and PyTorch's own casts are the oracles."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction
from functools import cache

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ampcheck.core.formats import FORMATS, FloatFormat, format_of
from ampcheck.strategies import cancelling_pairs, tensors, values

WORDS = {1: torch.uint8, 2: torch.int16}
LISTED = [
    name
    for name in (
        *("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
]
"""Formats whose values PyTorch can list, one by one."""
CAST = [name for name in LISTED if name != "float8_e8m0fnu"]
"""Formats to which PyTorch rounds to nearest everywhere."""
WIDE = ("float64", "float32", "bfloat16", "float16")


@cache
def listed(name: str) -> list[Fraction]:
    """The finite values of a format, of no sign, in the order of their codes, as PyTorch reads them."""
    dtype = getattr(torch, name)
    bits = 8 * dtype.itemsize
    count = 1 << (bits if name == "float8_e8m0fnu" else bits - 1)
    codes = torch.arange(count, dtype=torch.int32).to(WORDS[dtype.itemsize])
    return [Fraction(x) for x in codes.view(dtype).to(torch.float64).tolist() if math.isfinite(x)]


def nearest_code(name: str, x: float) -> int:
    """The place in the list of what is nearest to `|x|`, of two the even one; the length of the list says overflow."""
    known, size = listed(name), abs(Fraction(x))
    beyond = known[-1] + (known[-1] - known[-2]) * (2 if name == "float8_e8m0fnu" else 1)
    known = [*known, beyond]
    high = bisect.bisect_left(known, size)
    if high == len(known):
        return high - 1
    if high == 0:
        return 0
    below, above = size - known[high - 1], known[high] - size
    if below != above:
        return high - 1 if below < above else high
    # A format without a mantissa has odd significands only: the tie goes up, where the exponent carries.
    return high if name == "float8_e8m0fnu" or high % 2 == 0 else high - 1


@st.composite
def near_ties(draw: st.DrawFn, name: str, wide: str = "float64") -> float:
    """Halfway between two values of a format, or beside it by one unit in the last place of a wider format."""
    fmt, source = format_of(name), format_of(wide)
    value = abs(draw(values(fmt)))
    middle = value + fmt.ulp(value) / 2
    moved = middle + draw(st.sampled_from([0, -1, 1])) * source.ulp(middle)
    return source.round(moved, saturate=True) * (draw(st.sampled_from([1, -1])) if fmt.signed else 1)


@st.composite
def edges(draw: st.DrawFn, name: str, wide: str) -> float:
    """Where the outcome of a cast changes, by PyTorch's list, and both neighbours in the wider format."""
    if name == "float32":
        least, tiny, most = (Fraction(2) ** -149, Fraction(2) ** -126, (2 - Fraction(2) ** -24) * Fraction(2) ** 127)
    else:
        known = listed(name)
        least, tiny = known[1], Fraction(torch.finfo(getattr(torch, name)).tiny)
        most = known[-1] + (known[-1] - known[-2]) / 2
    place = float(draw(st.sampled_from([least / 2, tiny - least / 2, most])))
    moved = place + draw(st.sampled_from([0, -1, 1])) * format_of(wide).ulp(place)
    return format_of(wide).round(moved * draw(st.sampled_from([1, -1])), saturate=True)


def numbers_for(name: str) -> st.SearchStrategy[float]:
    """Numbers of every wider format, many of them where rounding to `name` decides."""
    wide = [values(one) for one in WIDE if one != name]
    return st.one_of(near_ties(name), near_ties(name, "float32"), *wide)


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


@given(name=st.sampled_from(LISTED), data=st.data())
def test_any_number_rounds_to_what_exact_arithmetic_finds_nearest_with_ties_to_even(
    name: str, data: st.DataObject
) -> None:
    fmt, x = format_of(name), data.draw(numbers_for(name))
    if not fmt.signed:
        x = abs(x)
    place, known = nearest_code(name, x), listed(name)
    if place < len(known):
        assert abs(Fraction(fmt.round(x))) == known[place]
        assert fmt.encode(abs(x)) == place
    else:
        assert fmt.round(abs(x)) == math.inf if fmt.has_inf else math.isnan(fmt.round(abs(x)))
        place = len(known) - 1
    assert abs(Fraction(fmt.round(x, saturate=True))) == known[place]
    assert fmt.round(x, saturate=True) in (0.0, math.copysign(float(known[place]), x))


def elements(wide: str, narrow: str) -> st.SearchStrategy[float]:
    nonfinite = values(wide, infinity=True, nan=True)
    ties = near_ties(narrow, wide).map(lambda x: format_of(wide).round(x, saturate=True))
    return st.one_of(nonfinite, ties, edges(narrow, wide))


def stops_at_max(fmt: FloatFormat) -> bool:
    """Whether the installed PyTorch's cast saturates: pytorch/pytorch#178817 came to this format alone."""
    return fmt.name == "float8_e4m3fn" and bool(torch.tensor(1e6).to(torch.float8_e4m3fn).float().isfinite())


@given(name=st.sampled_from(CAST), data=st.data())
def test_pytorchs_cast_of_a_tensor_of_any_layout_gives_what_round_gives(name: str, data: st.DataObject) -> None:
    wide = data.draw(st.sampled_from([one for one in WIDE if one != name]))
    tensor = data.draw(tensors(wide, layout="any", elements=elements(wide, name)))
    fmt, source = format_of(name), tensor.to(torch.float64).flatten().tolist()
    if wide == "float64":  # PyTorch goes by way of float32, and so rounds twice
        source = [FORMATS["float32"].round(x) for x in source]
    got = tensor.to(getattr(torch, name)).to(torch.float64).flatten().tolist()
    assert [x for x, y in zip(source, got, strict=True) if not same(fmt.round(x, saturate=stops_at_max(fmt)), y)] == []


@given(tensors("float64", layout="any", elements=elements("float64", "float32")))
def test_pytorchs_cast_to_float32_rounds_once_as_round_does(tensor: torch.Tensor) -> None:
    got = tensor.to(torch.float32).to(torch.float64).flatten().tolist()
    wrong = [x for x, y in zip(tensor.flatten().tolist(), got, strict=True) if not same(FORMATS["float32"].round(x), y)]
    assert wrong == []


@given(name=st.sampled_from([*CAST, "float32"]), data=st.data())
def test_the_thresholds_foretell_what_pytorchs_cast_makes_of_a_tensor(name: str, data: st.DataObject) -> None:
    wide = "float64" if name == "float32" else "float32"
    tensor = data.draw(tensors(wide, layout="any", elements=elements(wide, name)))
    fmt, dtype = format_of(name), getattr(torch, name)
    size = tensor.to(torch.float64).abs()
    after = tensor.to(dtype).to(torch.float64).abs()
    assert torch.equal(after == 0, size <= fmt.flushes_at)
    assert torch.equal(after < torch.finfo(dtype).tiny, size < fmt.subnormal_below)
    if not stops_at_max(fmt):
        assert torch.equal(~after.isfinite(), ~(size < fmt.overflows_at))
    else:
        inside = size < fmt.overflows_at
        assert bool((after[inside] <= fmt.max).all())
        assert bool((after[~inside & size.isfinite()] == fmt.max).all())


@given(fmt=st.sampled_from(list(FORMATS.values())), data=st.data())
def test_codes_count_through_the_numbers_in_their_order_and_signs_are_alike(
    fmt: FloatFormat, data: st.DataObject
) -> None:
    source = values("float64") if fmt.name == "float64" else near_ties(fmt.name) | values("float64")
    found = sorted(map(abs, data.draw(st.lists(source, max_size=8))))
    codes = [fmt.encode(x, saturate=True) for x in found]
    assert codes == sorted(codes)
    for x in found:
        rounded = fmt.round(x, saturate=True)
        assert same(fmt.round(rounded), rounded)
        if fmt.signed and fmt.nan != "negative-zero":
            assert same(fmt.round(-x, saturate=True), -rounded)


@given(name=st.sampled_from([*LISTED, "float32", "tf32", "float4_e2m1fn"]), data=st.data())
def test_rounding_and_a_power_of_two_may_change_places_within_the_normal_range(name: str, data: st.DataObject) -> None:
    """What a loss scale rests on: it moves gradients and leaves their digits alone."""
    fmt = format_of(name)
    digits = math.frexp(abs(data.draw(near_ties(name) | values("float64"))) or 1.0)[0]
    binades = st.integers(fmt.min_exponent, math.frexp(fmt.max)[1] - 1)
    x, moved = (math.ldexp(digits, data.draw(binades) + 1) for _ in range(2))
    assume(max(x, moved) < fmt.overflows_at)
    ratio = Fraction(moved) / Fraction(x)
    assert Fraction(fmt.round(moved)) == Fraction(fmt.round(x)) * ratio
    assert Fraction(fmt.ulp(moved)) == Fraction(fmt.ulp(x)) * ratio


@given(name=st.sampled_from(["float64", "float32", "float16"]), data=st.data())
def test_ulp_is_numpys_spacing(name: str, data: st.DataObject) -> None:
    x = abs(data.draw(values(name)))
    assume(x < format_of(name).max)
    assert format_of(name).ulp(x) == float(np.spacing(getattr(np, name)(x)))


@given(name=st.sampled_from(["float32", "bfloat16", "float16", "float8_e5m2"]), data=st.data())
def test_what_cancels_is_exact_and_a_whole_number_of_ulps(name: str, data: st.DataObject) -> None:
    """Sterbenz: the difference of two numbers within a factor of two of each other is a number of the format."""
    fmt = format_of(name)
    one, other = data.draw(cancelling_pairs(name))
    assume(one and other and Fraction(1, 2) <= Fraction(-other) / Fraction(one) <= 2)
    total = Fraction(one) + Fraction(other)
    assert Fraction(fmt.round(float(total))) == total
    assert (total / Fraction(min(fmt.ulp(one), fmt.ulp(other)))).denominator == 1
