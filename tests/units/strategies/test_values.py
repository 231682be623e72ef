"""`values`: floats that a format holds, over its bit patterns, and most often where something happens."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from ampcheck.core.errors import UsageError
from ampcheck.core.formats import FORMATS, format_of
from ampcheck.strategies import log_uniform, values
from ampcheck.strategies.values import magnitudes, sides

SEARCH = settings(max_examples=10_000, database=None, deadline=None, suppress_health_check=list(HealthCheck))
DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "float4_e2m1fn": ml_dtypes.float4_e2m1fn,
}


@given(st.data(), st.sampled_from(sorted(FORMATS)))
def test_every_value_is_one_of_the_format(data: st.DataObject, name: str) -> None:
    fmt = format_of(name)
    value = data.draw(values(name))
    assert math.isfinite(value)
    assert fmt.round(value) == value
    assert math.copysign(1, fmt.round(value)) == math.copysign(1, value)


@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_pattern_of_a_finite_value_can_be_drawn(name: str) -> None:
    fmt = format_of(name)
    with np.errstate(invalid="ignore"):
        decoded = np.arange(1 << fmt.bits, dtype=np.uint16 if fmt.bits > 8 else np.uint8).view(DTYPES[name])
        every = np.asarray(decoded, dtype=np.float64)
    known = sides(fmt, -fmt.max if fmt.signed else fmt.smallest_normal, fmt.max, True)
    parts = [part for side in known for group in side.groups for part in group]
    assert set(every[np.isfinite(every)].tolist()) == set(np.concatenate(parts).tolist())
    for side in known:
        assert np.diff(side.upto, prepend=0).min() > 0


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e5m2"])
def test_the_listed_values_are_those_that_the_format_decodes(name: str) -> None:
    fmt = format_of(name)
    assert magnitudes(fmt).tolist() == [fmt.decode(code) for code in range(fmt.encode(fmt.max) + 1)]


bounds = st.tuples(st.floats(-1e4, 1e4), st.floats(-1e4, 1e4)).map(sorted)


@settings(max_examples=40)  # each pair of bounds lists the values of the format once
@given(st.data(), st.sampled_from(["float16", "bfloat16", "float32", "float64"]), bounds)
def test_values_stay_within_their_bounds(data: st.DataObject, name: str, ends: list[float]) -> None:
    low, high = ends
    try:
        strategy = values(name, min_value=low, max_value=high)
    except UsageError:
        assert low <= high  # no value of the format lies between
        return
    assert low <= data.draw(strategy) <= high


@given(values("float16", subnormal=False))
def test_no_subnormal_comes_where_none_is_wanted(value: float) -> None:
    assert value == 0 or abs(value) >= format_of("float16").smallest_normal


FACTS = {
    "zero": lambda fmt, x: x == 0,
    "negative zero": lambda fmt, x: x == 0 and math.copysign(1, x) < 0,
    "the largest value": lambda fmt, x: x == fmt.max,
    "the one below it": lambda fmt, x: x == fmt.max - fmt.ulp(fmt.max),
    "the smallest normal value": lambda fmt, x: x == fmt.smallest_normal,
    "the largest subnormal": lambda fmt, x: x == fmt.smallest_normal - fmt.smallest_subnormal,
    "the smallest value": lambda fmt, x: x == fmt.smallest_subnormal,
    "the first integer that has no neighbour": lambda fmt, x: x == fmt.largest_exact_integer,
    "what follows 1": lambda fmt, x: x == 1 + fmt.eps,
    "a square that overflows": lambda fmt, x: x * x >= fmt.overflows_at and (x / 1.05) ** 2 < fmt.overflows_at,
    "an exp that overflows": lambda fmt, x: abs(x - math.log(fmt.max)) < 2 * fmt.ulp(x),
}


@pytest.mark.parametrize("fact", FACTS)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_what_is_notable_is_found_within_a_few_thousand_draws(name: str, fact: str) -> None:
    fmt = format_of(name)
    found = find(values(name), lambda x: FACTS[fact](fmt, x), settings=SEARCH, random=_seeded())
    assert FACTS[fact](fmt, found)


@pytest.mark.parametrize("narrow", ["float16", "bfloat16"])
def test_a_float32_comes_at_the_thresholds_of_what_it_is_cast_to(narrow: str) -> None:
    threshold = format_of("float32").round(format_of(narrow).overflows_at)
    assert find(values("float32"), lambda x: x == threshold, settings=SEARCH, random=_seeded()) == threshold


FAILS = {
    "always": lambda x: True,
    "positive": lambda x: x > 0,
    "large": lambda x: x >= 11.1,
    "negative": lambda x: x < -3.5,
    "a square that overflows": lambda x: x * x > 65504,
}


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("fails", FAILS)
def test_a_failure_shrinks_to_a_small_whole_number(name: str, fails: str) -> None:
    found = find(values(name), FAILS[fails], settings=SEARCH, random=_seeded())
    assert FAILS[fails](found)
    assert found == int(found)
    assert abs(found) <= 512 or fails == "a square that overflows"


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("limit", [3.2, 256, 300, 40000])
def test_what_fails_from_some_magnitude_on_shrinks_to_a_plain_number_where_it_begins(name: str, limit: float) -> None:
    fmt = format_of(name)
    plain = [float(n) for n in range(257)] + [2.0**n for n in range(9, 128) if 2.0**n < fmt.max] + [fmt.max]
    first = min(x for x in plain if x >= limit)
    # Beyond 256 integers of a wider format are simple as well.
    beginning = {first} if fmt.bits <= 16 else {first, fmt.round(math.ceil(limit))}
    for seed in range(2):
        random = _seeded(seed)
        assert find(values(name), lambda x: x >= limit, settings=SEARCH, random=random) in beginning
        assert -find(values(name), lambda x: x <= -limit, settings=SEARCH, random=random) in beginning
        least = find(values(name), lambda x: 0 < x <= 1 / limit, settings=SEARCH, random=random)
        assert fmt.bits > 16 or least == 2.0 ** math.floor(math.log2(1 / limit))


@pytest.mark.parametrize("name", ["float16", "float32", "float8_e4m3fn"])
def test_a_bound_of_zero_gives_zero_and_no_negative_zero(name: str) -> None:
    for bounds in ({"min_value": 0.0}, {"max_value": 0.0}):
        assert find(values(name, **bounds), lambda x: x == 0, settings=SEARCH) == 0

        def negative(x: float) -> bool:
            return x == 0 and math.copysign(1, x) < 0

        with pytest.raises(NoSuchExample):
            find(values(name, **bounds), negative, settings=settings(SEARCH, max_examples=300))


@pytest.mark.parametrize(("option", "wanted"), [("infinity", math.inf), ("infinity", -math.inf), ("nan", math.nan)])
def test_infinities_and_nan_come_when_they_are_asked_for(option: str, wanted: float) -> None:
    strategy = values("float16", **{option: True})
    assert repr(find(strategy, lambda x: repr(x) == repr(wanted), settings=SEARCH)) == repr(wanted)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"dtype": "float17"}, "float17"),
        ({"dtype": "float16", "min_value": 2, "max_value": 1}, "min_value <= max_value"),
        ({"dtype": "float16", "max_value": math.nan}, "finite bounds"),
        ({"dtype": "float16", "min_value": 1.0001, "max_value": 1.0002}, "has no value"),
        ({"dtype": "float8_e4m3fn", "infinity": True}, "no infinities"),
        ({"dtype": "float4_e2m1fn", "nan": True}, "no NaN"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_sentence(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        values(**arguments)
    assert "\n" not in str(caught.value)


@given(log_uniform(1e-6, 1e3))
def test_log_uniform_stays_within_its_magnitudes(value: float) -> None:
    assert 1e-6 <= abs(value) <= 1e3


def test_log_uniform_reaches_every_binade() -> None:
    for exponent in range(-8, 8):
        found = find(
            log_uniform(2.0**-8, 2.0**8), lambda x, e=exponent: 2.0**e <= abs(x) < 2.0 ** (e + 1), settings=SEARCH
        )
        assert found == 2.0**exponent


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.0, 1.0), (-1.0, 1.0), (1.0, math.inf)])
def test_log_uniform_needs_positive_bounds(low: float, high: float) -> None:
    with pytest.raises(UsageError, match="0 < low <= high"):
        log_uniform(low, high)


def _seeded(seed: int = 0) -> Any:
    import random

    return random.Random(seed)
