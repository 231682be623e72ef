"""Every fact about a format follows from its parameters and agrees with PyTorch, ml_dtypes and NumPy, bit for bit."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from functools import cache
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ampcheck.core.errors import UsageError
from ampcheck.core.formats import FORMATS, Fields, FloatFormat, format_of, table

# Formats whose every code can be visited, with the number of bytes NumPy stores one in.
SMALL = {f.name: f for f in FORMATS.values() if f.bits <= 16}
IN_TORCH = [name for name in FORMATS if hasattr(torch, name)]
EVERY = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
EVERY_SMALL = pytest.mark.parametrize("fmt", SMALL.values(), ids=SMALL)

float32_bits = st.integers(0, 2**32 - 1)
float64_bits = st.integers(0, 2**64 - 1)


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, None) or getattr(np, name))


def numpy_uint(fmt: FloatFormat) -> np.dtype:
    return np.dtype(f"u{numpy_dtype(fmt.name).itemsize}")


def numpy_values(fmt: FloatFormat) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return np.arange(2**fmt.bits, dtype=numpy_uint(fmt)).view(numpy_dtype(fmt.name)).astype(np.float64)


def numpy_codes(fmt: FloatFormat, values: list[float]) -> list[int]:
    """Codes to which NumPy (or ml_dtypes) casts the values, by way of float32 as PyTorch and ml_dtypes do."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = np.array(values, dtype=np.float32).astype(numpy_dtype(fmt.name))
    return narrow.view(numpy_uint(fmt)).tolist()


def torch_codes(fmt: FloatFormat, values: list[float]) -> list[int]:
    narrow = torch.tensor(values, dtype=torch.float32).to(getattr(torch, fmt.name))
    return narrow.view(torch.uint8 if fmt.bits == 8 else torch.int16).numpy().view(numpy_uint(fmt)).tolist()


@cache
def finite_codes(fmt: FloatFormat) -> list[int]:
    """Codes of the non-negative finite values, in the order of the values."""
    return [code for code in range(2**fmt.bits) if fmt.fields(code).sign == 0 and math.isfinite(fmt.decode(code))]


def same(a: float, b: float) -> bool:
    """Equal as values, zeros of different sign told apart, every NaN alike."""
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


def float32_from(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def float64_from(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


# Decoding and encoding.


@EVERY_SMALL
def test_every_code_decodes_to_the_value_numpy_reads(fmt):
    wrong = [c for c, value in enumerate(numpy_values(fmt).tolist()) if not same(fmt.decode(c), value)]
    assert wrong == []


@pytest.mark.parametrize("name", [name for name in SMALL if name in IN_TORCH])
def test_every_code_decodes_to_the_value_torch_reads(name):
    fmt = FORMATS[name]
    codes = np.arange(2**fmt.bits, dtype=numpy_uint(fmt)).view(f"i{numpy_dtype(name).itemsize}")
    values = torch.from_numpy(codes).view(getattr(torch, name)).to(torch.float64).tolist()
    assert [c for c, value in enumerate(values) if not same(fmt.decode(c), value)] == []


@EVERY_SMALL
def test_every_value_encodes_to_its_own_code(fmt):
    numbers = [code for code in range(2**fmt.bits) if not math.isnan(fmt.decode(code))]
    assert [fmt.encode(fmt.decode(code)) for code in numbers] == numbers
    assert len({(fmt.decode(code), fmt.fields(code).sign) for code in numbers}) == len(numbers)


@EVERY_SMALL
def test_every_nan_encodes_to_the_quiet_nan_of_its_sign_as_in_numpy(fmt):
    for code in range(2**fmt.bits):
        value = fmt.decode(code)
        if math.isnan(value):
            assert fmt.encode(value) == numpy_codes(fmt, [value])[0]


@EVERY_SMALL
def test_midpoints_go_to_the_even_neighbour_and_all_else_to_the_nearer_one(fmt):
    """Checked in float64, one ULP of float64 beside every midpoint, where a second rounding would show."""
    codes = finite_codes(fmt)
    sign = 1 << (fmt.bits - 1) if fmt.signed else 0
    for low, high in pairwise(codes):
        a, b = fmt.decode(low), fmt.decode(high)
        middle = (a + b) / 2
        even = low if low % 2 == 0 else high
        if fmt.mantissa_bits == 0:
            even = high  # the only significand, 1, is odd: a tie goes up to 2
        assert fmt.encode(middle) == even, (a, middle, b)
        assert fmt.encode(math.nextafter(middle, 0)) == low
        assert fmt.encode(math.nextafter(middle, math.inf)) == high
        if sign and (even or fmt.nan != "negative-zero"):
            assert fmt.encode(-middle) == even | sign


@EVERY_SMALL
def test_values_midpoints_and_their_neighbours_cast_as_in_numpy_and_torch(fmt):
    """The libraries cast by way of float32, so their neighbours of a midpoint are float32 neighbours."""
    values = np.array([fmt.decode(code) for code in finite_codes(fmt)], dtype=np.float64)
    middles = np.concatenate([(values[:-1] + values[1:]) / 2, [fmt.max + fmt.ulp(fmt.max) / 2]]).astype(np.float32)
    below, above = np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(np.inf))
    positive = np.concatenate([values, middles, below, above, [math.inf]]).astype(np.float64)
    positive = positive[positive > 0]  # zero and negative values of float8_e8m0fnu have a test of their own
    if fmt.name == "float8_e8m0fnu":
        # Both libraries take everything between 2**-127 and 2**-126 to 2**-126, be it nearer or not.
        positive = positive[(positive <= 2.0**-127) | (positive >= 1.5 * 2.0**-127)]
    inputs = [*positive.tolist(), *((-positive).tolist() if fmt.signed else [])]
    assert [fmt.encode(x) for x in inputs] == numpy_codes(fmt, inputs)
    if fmt.name in IN_TORCH:
        saturate = torch_saturates(fmt)
        assert [fmt.encode(x, saturate=saturate) for x in inputs] == torch_codes(fmt, inputs)


def torch_saturates(fmt: FloatFormat) -> bool:
    """Whether the installed PyTorch has the saturating cast of pytorch/pytorch#178817; it came to this format alone."""
    if fmt.name != "float8_e4m3fn":
        return False
    return bool(torch.tensor(1e6).to(torch.float8_e4m3fn).float().isfinite())


@given(float32_bits)
@example(0x7F800000)
@example(0xFFFFFFFF)
@example(1)
def test_float32_decodes_any_bit_pattern_as_numpy_and_encodes_it_back(bits):
    fmt = FORMATS["float32"]
    value = float(np.array(bits, dtype=np.uint32).view(np.float32))
    assert same(fmt.decode(bits), value)
    if not math.isnan(value):
        assert fmt.encode(value) == bits


@given(float64_bits)
@example(0x36A0000000000000)  # half of the smallest float32 subnormal
@example(0x47EFFFFFF0000000)  # the first float64 that overflows float32
def test_any_float64_casts_to_float32_and_float16_as_in_numpy_which_rounds_once(bits):
    value = float64_from(bits)
    if math.isnan(value):
        return
    with np.errstate(over="ignore", under="ignore"):
        assert FORMATS["float32"].encode(value) == int(np.float64(value).astype(np.float32).view(np.uint32))
        assert FORMATS["float16"].encode(value) == int(np.float64(value).astype(np.float16).view(np.uint16))


@given(st.floats(-70000, 70000))
def test_float16_casts_the_values_within_its_range_as_numpy_which_rounds_once(value):
    with np.errstate(over="ignore", under="ignore"):
        assert FORMATS["float16"].encode(value) == int(np.float64(value).astype(np.float16).view(np.uint16))


@given(float64_bits)
def test_float64_is_the_identity(bits):
    fmt = FORMATS["float64"]
    value = float64_from(bits)
    assert same(fmt.decode(bits), value)
    assert same(fmt.round(value), value)
    if not math.isnan(value):
        assert fmt.encode(value) == bits


@given(float32_bits)
@example(0x7F7FFFFF)
@example(0x00001000)
def test_tf32_is_float32_rounded_to_ten_mantissa_bits(bits):
    fmt = FORMATS["tf32"]
    if not math.isfinite(float32_from(bits)):
        return
    dropped = 23 - 10
    kept = (bits + (1 << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped  # the usual integer trick
    assert fmt.encode(float32_from(bits)) == kept
    assert same(fmt.round(float32_from(bits)), float32_from(kept << dropped))


@EVERY
def test_fields_put_the_code_together(fmt):
    for code in (0, 1, fmt.encode(1.0), fmt.encode(fmt.max), 2**fmt.bits - 1):
        sign, exponent, mantissa = fmt.fields(code)
        assert (sign << fmt.exponent_bits | exponent) << fmt.mantissa_bits | mantissa == code
    assert fmt.fields(fmt.encode(1.0)) == Fields(0, fmt.bias, 0)
    for code in (-1, 2**fmt.bits):
        with pytest.raises(UsageError, match=fmt.name):
            fmt.decode(code)


def test_a_code_may_be_a_numpy_integer():
    assert FORMATS["float8_e4m3fn"].decode(np.uint8(1)) == 2.0**-9
    assert FORMATS["float8_e4m3fn"].decode(np.uint8(0xC0)) == -2.0


# Facts.


@pytest.mark.parametrize("name", IN_TORCH)
def test_facts_agree_with_torch_finfo(name):
    fmt, info = FORMATS[name], torch.finfo(getattr(torch, name))
    assert (fmt.bits, fmt.max, fmt.smallest_normal) == (info.bits, info.max, info.tiny)
    assert fmt.decimal_digits == -round(math.log10(info.resolution))
    if name != "float8_e5m2fnuz":  # torch.finfo says 0.125 for two mantissa bits; ml_dtypes says 0.25
        assert fmt.eps == info.eps


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "tf32"])
def test_facts_agree_with_ml_dtypes_or_numpy_finfo(name):
    fmt, info = FORMATS[name], ml_dtypes.finfo(numpy_dtype(name))
    ours = (fmt.bits, fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.eps)
    assert ours == tuple(map(float, (info.bits, info.max, info.tiny, info.smallest_subnormal, info.eps)))
    assert (fmt.exponent_bits, fmt.mantissa_bits) == (info.nexp, info.nmant)
    assert fmt.unit_roundoff == 2.0 ** -(info.nmant + 1)


def test_tf32_has_the_range_of_float32_and_the_precision_of_float16():
    tf32, float32, float16 = FORMATS["tf32"], FORMATS["float32"], FORMATS["float16"]
    assert tf32.bits == 19
    assert tf32.smallest_normal == float32.smallest_normal
    assert tf32.overflows_at > tf32.max > 0.999 * float32.max
    assert (tf32.eps, tf32.unit_roundoff, tf32.decimal_digits) == (float16.eps, 2.0**-11, float16.decimal_digits)


@EVERY_SMALL
def test_facts_agree_with_the_list_of_all_values(fmt):
    values = [fmt.decode(code) for code in finite_codes(fmt)]
    assert values == sorted(values)
    positive = [value for value in values if value > 0]
    assert (positive[0], positive[-1]) == (fmt.smallest_subnormal, fmt.max)
    assert min(value for value in values if value > 1) == 1 + fmt.eps
    n = fmt.largest_exact_integer
    assert set(range(1, n + 1)) <= set(values)
    assert n + 1 not in values


@EVERY_SMALL
def test_ulp_is_the_distance_to_the_next_larger_magnitude(fmt):
    values = [fmt.decode(code) for code in finite_codes(fmt)]
    for low, high in pairwise(values):
        assert fmt.ulp(low) == fmt.ulp(-low) == fmt.ulp((low + high) / 2) == high - low


@EVERY
def test_ulp_is_defined_at_zero_below_every_value_beyond_max_at_infinity_and_at_nan(fmt):
    assert fmt.ulp(0.0) == fmt.ulp(-0.0) == fmt.ulp(fmt.smallest_subnormal / 4) == fmt.smallest_subnormal
    assert fmt.ulp(math.inf) == fmt.ulp(-math.inf) == math.inf
    assert math.isnan(fmt.ulp(math.nan))
    if fmt.name != "float64":
        assert fmt.ulp(2.0**200) == 2.0**200 * fmt.eps


@given(st.floats())
def test_ulp_of_float64_is_that_of_the_standard_library(x):
    assert same(FORMATS["float64"].ulp(x), abs(math.ulp(x)))


# What a cast does is a threshold on the wide value.


def test_thresholds_of_float16_and_bfloat16_are_the_known_ones():
    half, bf16 = FORMATS["float16"], FORMATS["bfloat16"]
    assert (half.flushes_at, half.subnormal_below, half.overflows_at) == (2**-25, 2**-14 - 2**-25, 65520)
    assert bf16.flushes_at == 2.0**-134
    assert bf16.subnormal_below == 2.0**-126 - 2.0**-134
    assert bf16.overflows_at == math.ldexp(1 - 2**-9, 128)


@EVERY
def test_the_thresholds_are_where_rounding_changes_its_outcome(fmt):
    def leaves_the_range(x):
        rounded = fmt.round(x)
        return not math.isfinite(rounded) or (fmt.overflow == "saturate" and x - fmt.max >= fmt.ulp(x) / 2)

    if fmt.flushes_at:
        assert fmt.round(fmt.flushes_at) == 0
        assert fmt.round(math.nextafter(fmt.flushes_at, 1)) == fmt.smallest_subnormal
    else:
        assert fmt.round(5e-324) > 0
    if fmt.subnormal_below:
        assert fmt.round(fmt.subnormal_below) == fmt.smallest_normal
        assert fmt.round(math.nextafter(fmt.subnormal_below, 0)) < fmt.smallest_normal
    else:
        assert fmt.round(5e-324) == fmt.smallest_normal
    assert leaves_the_range(fmt.overflows_at)
    assert not leaves_the_range(math.nextafter(fmt.overflows_at, 0))
    assert fmt.round(math.nextafter(fmt.overflows_at, 0)) == fmt.max


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.name not in ("float64", "float8_e8m0fnu")], ids=str)
@given(st.data())
def test_the_thresholds_foretell_the_fate_of_any_value(fmt, data):
    edges = (fmt.flushes_at, fmt.subnormal_below, fmt.overflows_at)
    near = st.sampled_from(edges).flatmap(lambda edge: st.floats(edge * 0.99, edge * 1.01))
    x = data.draw(near | st.floats(0, allow_infinity=True))
    rounded = fmt.round(x)
    assert (rounded == 0) == (x <= fmt.flushes_at)
    assert (rounded < fmt.smallest_normal) == (x < fmt.subnormal_below)
    if fmt.overflow != "saturate":
        assert (not math.isfinite(rounded)) == (x >= fmt.overflows_at)
    assert fmt.round(x, saturate=True) == (fmt.max if x >= fmt.overflows_at else rounded)


@EVERY
@given(x=st.floats(allow_nan=False), y=st.floats(allow_nan=False))
def test_rounding_is_monotone_idempotent_and_within_half_an_ulp(fmt, x, y):
    if not fmt.signed:
        x, y = abs(x), abs(y)
    a, b = (fmt.round(v, saturate=True) for v in sorted((x, y)))
    assert a <= b
    assert same(fmt.round(a), a)
    smallest = 0 if fmt.has_subnormals else fmt.smallest_normal
    if smallest <= abs(x) < fmt.overflows_at:
        assert abs(fmt.round(x) - x) <= fmt.ulp(x) / 2


# Overflow, and formats that lack something.


@EVERY
def test_overflow_follows_from_the_parameters(fmt):
    fates = {"inf": math.inf, "nan": math.nan, "saturate": fmt.max}
    assert fmt.overflow == ("inf" if fmt.has_inf else "saturate" if fmt.nan == "none" else "nan")
    for x in (math.inf, fmt.overflows_at):
        if math.isfinite(x) or fmt.name == "float64":
            assert same(fmt.round(x), fates[fmt.overflow])
            assert fmt.round(x, saturate=True) == fmt.max
            if fmt.signed:
                assert same(fmt.round(-x), -fates[fmt.overflow])
                assert fmt.round(-x, saturate=True) == -fmt.max


@pytest.mark.parametrize("name", ["float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_fnuz_formats_have_one_zero_and_one_nan(name):
    fmt = FORMATS[name]
    inputs = [-0.0, -1e-30, 1e-30, math.nan, -math.nan, math.inf, -math.inf]
    assert [fmt.encode(x) for x in inputs] == [0, 0, 0, 0x80, 0x80, 0x80, 0x80]
    assert numpy_codes(fmt, inputs) == torch_codes(fmt, inputs) == [fmt.encode(x) for x in inputs]


@pytest.mark.needs_torch("2.7", "float8_e8m0fnu")
def test_e8m0_has_neither_zero_nor_sign():
    fmt = FORMATS["float8_e8m0fnu"]
    assert not any(fmt.decode(code) <= 0 for code in range(256))
    tiny = [0.0, 2.0**-149, 2.0**-128, 2.0**-127]
    assert [fmt.encode(x) for x in tiny] == torch_codes(fmt, tiny) == [0, 0, 0, 0]
    negative = [-2.0, -(2.0**-127), -math.inf]
    assert [fmt.encode(x) for x in negative] == numpy_codes(fmt, negative) == [255, 255, 255]
    assert [fmt.encode(x) for x in (math.nan, math.inf)] == torch_codes(fmt, [math.nan, math.inf]) == [255, 255]


def test_e2m1_has_no_nan_to_give():
    with pytest.raises(UsageError, match="float4_e2m1fn has no NaN"):
        FORMATS["float4_e2m1fn"].encode(math.nan)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ((5, 10, 15, True, "quiet"), "nan must be one of ieee, all-ones"),
        ((5, 10, 15, True, "none"), "if and only if"),
        ((4, 3, 8, False, "negative-zero", False), "unsigned"),
        ((0, 3, 0, False, "none"), "too few"),
        ((4, 0, 7, True, "ieee"), "too few"),
        ((15, 112, 16383, True, "ieee"), "fit in a float64"),
        ((11, 52, 1024, True, "ieee"), "fit in a float64"),
        ((11, 52, 1022, True, "ieee"), "fit in a float64"),
    ],
)
def test_parameters_that_make_no_format_are_refused(parameters, message):
    with pytest.raises(UsageError, match=message):
        FloatFormat("mine", *parameters)


def test_a_format_of_ones_own_needs_only_its_parameters():
    fmt = FloatFormat("float8_e4m3", 4, 3, 7, has_inf=True, nan="ieee")
    assert [c for c, value in enumerate(numpy_values(fmt).tolist()) if not same(fmt.decode(c), value)] == []
    assert fmt.max == 240


# Looking formats up.


def test_format_of_takes_dtypes_names_aliases_and_formats():
    for name in IN_TORCH:
        assert format_of(getattr(torch, name)) is format_of(f"torch.{name}") is format_of(name) is FORMATS[name]
    for alias, name in {"half": "float16", "bf16": "bfloat16", "float": "float32", "e4m3fn": "float8_e4m3fn"}.items():
        assert format_of(alias) is FORMATS[name]
    assert format_of(FORMATS["tf32"]) is FORMATS["tf32"]
    if hasattr(torch, "float4_e2m1fn_x2"):
        assert format_of(torch.float4_e2m1fn_x2) is FORMATS["float4_e2m1fn"]


@pytest.mark.parametrize("wrong", [torch.int8, torch.complex64, "float17", "", None])
def test_format_of_names_the_valid_formats_when_it_refuses(wrong):
    with pytest.raises(UsageError, match=r"float64, float32, tf32, bfloat16, float16, .*float4_e2m1fn; got"):
        format_of(wrong)


def test_formats_cannot_be_changed():
    with pytest.raises(TypeError):
        FORMATS["mine"] = FORMATS["float16"]
    with pytest.raises(AttributeError):
        FORMATS["float16"].bias = 16


def test_the_table_has_a_row_of_derived_facts_for_every_format():
    rows = {row["name"]: row for row in table()}
    assert list(rows) == list(FORMATS)
    half = rows["float16"]
    assert list(half.values()) == ["float16", 16, 5, 10, 65504, 2**-14, 2**-24, 2**-10, 3, True, True, "inf"]
    assert {"max", "smallest normal", "smallest subnormal", "eps", "decimal digits"} < half.keys()
    assert (rows["float4_e2m1fn"]["nan"], rows["float8_e4m3fn"]["inf"]) == (False, False)


def test_formats_need_neither_torch_nor_numpy():
    code = "import sys, ampcheck.core.formats; sys.exit(bool({'torch', 'numpy', 'ml_dtypes'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
