"""Which values a range has, and how often each comes: its ends, its zeros, every value of a format, an even share."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from ampcheck.core.formats import FORMATS, FloatFormat, format_of
from ampcheck.strategies import tensors, values
from ampcheck.strategies.values import Side, inner, sides

SEARCH = settings(max_examples=2000, database=None, deadline=None, suppress_health_check=list(HealthCheck))


def custom(exponent_bits: int, mantissa_bits: int) -> FloatFormat:
    name, bias = f"e{exponent_bits}m{mantissa_bits}", (1 << exponent_bits - 1) - 1
    return FloatFormat(name, exponent_bits, mantissa_bits, bias, has_inf=True, nan="ieee")


def chances(side: Side) -> Counter[float]:
    """How often each value comes, of 1, where all numbers are drawn alike."""
    found: Counter[float] = Counter()
    first = 0
    for end in side.upto.tolist():
        count = side.betweens(first)
        for between in range(count):
            found[side.at(first, between)] += (end - first) / side.plains / count
        first = end
    return found


@pytest.mark.parametrize(
    "fmt",
    [
        *(FORMATS[name] for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu")),
        *(custom(*bits) for bits in ((11, 4), (3, 12), (2, 13), (6, 9), (2, 1))),
    ],
    ids=lambda fmt: fmt.name,
)
def test_every_value_of_a_listed_format_is_reached_by_some_numbers(fmt: FloatFormat) -> None:
    magnitudes = {fmt.decode(code) for code in range(fmt.encode(fmt.max) + 1)}
    known = sides(fmt, -fmt.max, fmt.max, True)
    assert len(known) == 1 + fmt.signed
    assert set(chances(known[0])) == magnitudes
    assert all({-value for value in chances(side)} == magnitudes for side in known[1:])


def test_so_is_every_value_of_tf32_beyond_float16_too() -> None:
    fmt, ends = format_of("tf32"), (2.0**100, 2.0**103)
    first, last = (fmt.encode(end) for end in ends)
    (side,) = sides(fmt, *ends, True)
    assert set(chances(side)) == {fmt.decode(code) for code in range(first, last + 1)}
    groups = sides(fmt, 0.0, fmt.max, True)[0].groups
    assert len({value for group in groups for part in group for value in part.tolist()}) == fmt.encode(fmt.max) + 1


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float8_e5m2"])
@pytest.mark.parametrize("bounds", [(0.1, 0.7), (-0.7, -0.1), (0.0, 1.1), (-1.1, 0.9), (3.3, 777.7)])
def test_the_ends_of_a_range_are_notable(name: str, bounds: tuple[float, float]) -> None:
    fmt = format_of(name)
    first = next(x for x in _near(fmt, bounds[0]) if x >= bounds[0])
    last = next(x for x in _near(fmt, bounds[1])[::-1] if x <= bounds[1])
    assert inner(fmt, *bounds, True) == (first, last)
    known = sides(fmt, first, last, True)
    often: Counter[float] = Counter()
    for side in known:
        for value, chance in chances(side).items():
            often[value] += chance / len(known)
    assert min(often[first], often[last]) >= 0.003


def _near(fmt: FloatFormat, x: float) -> list[float]:
    """The value nearest to x and both its neighbours, in order."""
    near = fmt.round(x)
    step = fmt.ulp(near) / 2  # below a power of two the spacing is half
    return sorted({fmt.round(near + n * step) for n in (-2, -1, 0, 1, 2)})


@given(st.data(), st.sampled_from([*FORMATS.values(), custom(5, 2), custom(8, 20)]), st.booleans())
def test_a_range_begins_and_ends_with_values_of_the_format(
    data: st.DataObject, fmt: FloatFormat, subnormal: bool
) -> None:
    listed = fmt.bits <= 8
    every = [fmt.decode(code) for code in range(1 << fmt.bits)] if listed else []
    every = [x for x in every if math.isfinite(x) and (subnormal or x == 0 or abs(x) >= fmt.smallest_normal)]
    reach = min(1.5 * fmt.max, 1e308)
    low, high = sorted(data.draw(st.tuples(*[st.floats(-reach, reach) | st.floats(-2, 2)] * 2)))
    found = inner(fmt, low, high, subnormal)
    inside = [x for x in every if low <= x <= high]
    if listed:
        assert found == ((min(inside), max(inside)) if inside else None)
    elif found is not None:
        assert low <= found[0] <= found[1] <= high
        assert [fmt.round(x) for x in found] == list(found)


@pytest.mark.parametrize("bounds", [{"min_value": -1e300}, {"max_value": 1e300}, {"min_value": 1, "max_value": 1e300}])
@pytest.mark.parametrize("name", ["float32", "float16", "tf32"])
def test_a_bound_beyond_the_format_is_no_bound(name: str, bounds: dict[str, float]) -> None:
    limit = format_of(name).max
    assert abs(find(values(name, **bounds), lambda x: abs(x) == limit, settings=SEARCH)) == limit


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "tf32", "float8_e4m3fn"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("bound", ["min_value", "max_value"])
@settings(max_examples=200, database=None, derandomize=True)
@given(data=st.data())
def test_zero_at_a_bound_is_positive(name: str, zero: float, bound: str, data: st.DataObject) -> None:
    value = data.draw(values(name, **{bound: zero}))
    assert value != 0 or math.copysign(1, value) > 0


@pytest.mark.parametrize("name", ["float16", "float32", "tf32", "float8_e4m3fn"])
def test_both_zeros_come_within_a_range(name: str) -> None:
    for text in ("0.0", "-0.0"):
        strategy = values(name, min_value=-1, max_value=1)
        assert repr(find(strategy, lambda x, text=text: repr(x) == text, settings=SEARCH)) == text


@settings(max_examples=300, database=None, derandomize=True)
@given(values("float8_e4m3fnuz"))
def test_a_format_without_negative_zero_has_none(value: float) -> None:
    assert repr(value) != "-0.0"


@given(values(custom(4, 20)))
def test_a_wide_format_of_few_exponents_gives_its_own_values_alone(value: float) -> None:
    assert custom(4, 20).round(value) == value


def test_any_value_of_a_wide_format_may_come() -> None:
    fmt = custom(8, 20)
    narrow = format_of("float16"), format_of("bfloat16")
    own = find(values(fmt), lambda x: 1 < x < 2 and all(one.round(x) != x for one in narrow), settings=SEARCH)
    assert fmt.round(own) == own


def test_a_share_lies_evenly_over_the_range() -> None:
    for name in ("float16", "bfloat16"):
        (side,) = sides(format_of(name), 0.0, 1.0, True)
        upper = sum(chance for value, chance in chances(side).items() if 0.5 < value < 1)
        # One share of six lies evenly over the range: a half of it in the upper half, a part of that at 0.5 itself.
        assert upper > 0.055, name


def test_what_lies_between_plain_numbers_has_few_significant_bits_first() -> None:
    (side,) = sides(format_of("float16"), 1.0, 65504.0, True)
    for group in side.groups:
        rest = [int(x * 1024) for x in group[-1].tolist()]
        bits = [(n // (n & -n)).bit_length() for n in rest]
        assert bits == sorted(bits)


def test_draws_from_a_small_range_differ() -> None:
    found = set()

    @settings(max_examples=200, database=None, derandomize=True)
    @given(tensors("float16", shape=1, min_value=-1, max_value=1))
    def draw(x: Any) -> None:
        found.add(x.item())

    draw()
    assert len(found) >= 55


@pytest.mark.parametrize(
    ("dtype", "bounds", "span"),
    [
        ("int64", {}, (0, 127)),
        ("int64", {"min_value": 127}, (127, 254)),
        ("int64", {"min_value": 120}, (120, 247)),
        ("int64", {"min_value": -5}, (-5, 127)),
        ("int64", {"max_value": -1}, (-128, -1)),
        ("int64", {"max_value": 300}, (0, 300)),
        ("int8", {"min_value": 120}, (120, 127)),
    ],
)
def test_one_bound_of_integers_leaves_as_many_as_are_promised(
    dtype: str, bounds: dict[str, float], span: tuple[int, int]
) -> None:
    strategy = tensors(dtype, shape=(), **bounds)  # type: ignore[arg-type]
    for end in span:
        assert find(strategy, lambda x, end=end: int(x) == end, settings=SEARCH).item() == end
    low, high = span

    @settings(max_examples=50, database=None)
    @given(strategy)
    def draw(x: Any) -> None:
        assert low <= int(x) <= high

    draw()
