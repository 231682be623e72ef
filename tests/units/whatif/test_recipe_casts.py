"""Emulated casts, against ml_dtypes, the definition in `ampcheck.core.formats`, and torchao where it is installed."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ampcheck.core.formats import format_of
from ampcheck.whatif.casts import cast, in_blocks, rounded, transformed
from ampcheck.whatif.recipes import ALL, RECIPES, Operand

ELEMENTS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
FLOATS = st.floats(width=32, allow_nan=False)
of_each_element = pytest.mark.parametrize("name", ELEMENTS)


@of_each_element
@given(values=arrays(numpy.float32, 64, elements=FLOATS))
def test_rounding_is_that_of_the_format_with_saturation(name: str, values: numpy.ndarray) -> None:
    element = format_of(name)
    ours = rounded(torch.from_numpy(values), element).tolist()
    assert ours == [element.round(float(value), saturate=True) for value in values]


@of_each_element
def test_rounding_is_that_of_ml_dtypes_on_a_million_values(name: str) -> None:
    bits = numpy.random.default_rng(0).integers(0, 2**32, 1_000_000, dtype=numpy.uint32)
    values = bits.view(numpy.float32)
    values[: len(values) // 2] = numpy.ldexp(values[: len(values) // 2].view(numpy.uint32) / 2.0**32, -12)
    largest = numpy.float32(format_of(name).max)
    values = numpy.clip(numpy.nan_to_num(values, nan=1.0), -largest, largest)
    theirs = values.astype(getattr(ml_dtypes, name)).astype(numpy.float32)
    assert numpy.array_equal(
        rounded(torch.from_numpy(values), format_of(name)).numpy().view(numpy.uint32), theirs.view(numpy.uint32)
    )


@of_each_element
def test_stochastic_rounding_has_the_value_as_its_mean(name: str) -> None:
    value = 1.1
    drawn = rounded(torch.full((40_000,), value), format_of(name), torch.Generator().manual_seed(0))
    assert len(drawn.unique()) == 2
    assert float(drawn.mean()) == pytest.approx(value, abs=4 * float(drawn.std()) / 200)


@pytest.mark.parametrize("name", RECIPES)
@given(values=arrays(numpy.float32, (3, 40), elements=st.floats(-1e6, 1e6, width=32)))
def test_a_cast_is_within_a_step_of_its_block(name: str, values: numpy.ndarray) -> None:
    x = torch.from_numpy(values)
    for operand in (o for product in ("forward", "grad_input", "grad_weight") for o in RECIPES[name][product] or ()):
        error = (cast(x, operand, generator=torch.Generator().manual_seed(0)).values - x).abs()
        largest = in_blocks(x, operand.block).abs().amax(dim=(1, 3), keepdim=True)
        step = operand.element.ulp(operand.element.max) / operand.element.max
        saturates = 0.5 if operand.scale == "e8m0 floor" else 0.0
        limit = largest * max(step, saturates) + operand.least + 1e-30
        if operand.scale == "e4m3":  # the scale itself is rounded, and has a floor
            limit = largest * (step + 0.2) + float(x.abs().max()) * 2**-6 / 448 + 1e-30  # scales are float32
        assert bool((in_blocks(error, operand.block) <= limit).all())


def test_zeros_stay_zeros_and_shapes_that_are_no_multiple_are_kept() -> None:
    for recipe in RECIPES.values():
        for operand in recipe.forward or ():
            tiny = torch.tensor([[1e-36, 0.0, 1e-38, -1e-44]])
            assert bool(cast(tiny, operand).values.isfinite().all())
            values = cast(torch.zeros(5, 33), operand).values
            assert values.shape == (5, 33)
            assert not values.any()
            assert [cast(torch.ones(shape), operand).values.shape for shape in ((0, 8), (8, 0))] == [(0, 8), (8, 0)]


def test_what_saturates_and_what_becomes_zero_is_counted() -> None:
    x = torch.tensor([[448.0, 1e-9, 1.0, 0.0]])
    _, saturated, flushed = cast(x, Operand(), shares=True)
    assert (saturated, flushed) == (0.0, pytest.approx(1 / 3))
    saturated = cast(x, Operand(), amax=torch.tensor(1.0), shares=True).saturated
    assert saturated == pytest.approx(1 / 3)


def test_a_stale_amax_saturates_what_has_grown() -> None:
    x = torch.tensor([[1.0, 4.0]])
    assert cast(x, Operand(history=16), amax=torch.tensor(1.0)).values.tolist() == [[1.0, 1.0]]


def test_an_mx_block_has_the_scale_of_the_specification() -> None:
    floor = Operand(block=(1, 2), scale="e8m0 floor", least=0.0)
    assert cast(torch.tensor([[511.0, 1.0]]), floor).values.tolist() == [[448.0, 1.0]]  # scale 1: 511 saturates
    assert cast(torch.tensor([[511.0, 1.0]]), replace(floor, scale="e8m0 ceil")).values.tolist() == [[512.0, 1.0]]
    assert cast(torch.tensor([[math.inf, 1.0]]), floor).values.isnan().all()


def test_scales_of_blocks_that_stand_alone_end_where_e4m3_does() -> None:
    alone, both = (Operand("float4_e2m1fn", (1, 2), scale, 0.0) for scale in ("e4m3 alone", "e4m3"))
    usual, small, large = (torch.tensor([[size, size / 3]]) for size in (6.0, 1e-3, 6e5))
    assert cast(usual, alone).values.tolist() == cast(usual, both).values.tolist() == [[6.0, 2.0]]
    assert not cast(small, alone).values.any()  # the least scale, 2^-6, is above four times the values
    assert cast(small, both).values.count_nonzero() == 2
    assert cast(large, alone).values[0, 0] == 448 * 6


def test_a_hadamard_transform_leaves_products_as_they_are() -> None:
    a, b = torch.randn(4, 40), torch.randn(3, 40)
    turned = [transformed(x, 16, torch.Generator().manual_seed(7)) for x in (a, b)]
    assert turned[0].shape == (4, 48)
    torch.testing.assert_close(turned[0] @ turned[1].T, a @ b.T)


def test_a_rowwise_scale_spares_the_other_rows_from_an_outlier() -> None:
    x = torch.ones(2, 16)
    x[0] = 1e8
    assert not cast(x, Operand()).values[1].any()
    assert bool((cast(x, Operand(block=(1, ALL))).values[1] == 1).all())


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
@given(seed=st.integers(0, 1000))
def test_products_are_those_of_scaled_mm(name: str, seed: int) -> None:
    """Of operands with float32 scales; sums of float32 differ in their order alone."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(32, 64, generator=generator) for _ in range(2))
    first, second = RECIPES[name].forward or ()
    ours = cast(a, first).values @ cast(b, second).values.T
    codes, scales = [], []
    for x, operand in ((a, first), (b, second)):
        largest = x.abs().amax(1, keepdim=True) if name == "rowwise" else x.abs().amax()
        factor = (448 / largest.double()).float()
        factor = torch.exp2(torch.floor(torch.log2(factor))) if operand.scale == "power of two" else factor
        codes.append((x * factor).clamp(-448, 448).to(torch.float8_e4m3fn))
        scales.append(factor.reciprocal())
    if name == "rowwise":  # a CPU takes one scale
        theirs = torch._scaled_mm(codes[0], codes[1].T, torch.tensor(1.0), torch.tensor(1.0), out_dtype=torch.float32)
        theirs = theirs * scales[0] * scales[1].T
    else:
        theirs = torch._scaled_mm(codes[0], codes[1].T, *scales, out_dtype=torch.float32)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
