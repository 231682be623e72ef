"""Promise: the spacing of tensors is the ULP of each of their elements, at zero and among subnormals too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.core.formats import format_of
from ampcheck.torchtools.spacing import spacing
from ampcheck.training.reductions.sums import compare_sum, one_rounding

NAMES = ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("name", NAMES)
@given(value=st.floats(-60000.0, 60000.0))
def test_it_is_the_ulp_of_the_format(name: str, value: float) -> None:
    form = format_of(name)
    assert float(spacing(torch.tensor([value], dtype=torch.float64), form)) == form.ulp(value)


@pytest.mark.parametrize("name", NAMES)
def test_at_zero_it_is_the_smallest_subnormal_number(name: str) -> None:
    form = format_of(name)
    values = torch.tensor([0.0, -0.0, form.smallest_subnormal / 2], dtype=torch.float64)
    assert spacing(values, form).tolist() == [form.smallest_subnormal] * 3


@pytest.mark.parametrize("zeros", [0, 16, 4096])
def test_zeros_do_not_make_a_rounding_larger(zeros: int) -> None:
    """The gradient of a one-hot feature that never occurs is exactly zero, and rounds to zero."""
    form, few = format_of("bfloat16"), torch.rand(64, dtype=torch.float64) + 1.0
    values = torch.cat((few, torch.zeros(zeros, dtype=torch.float64)))
    assert one_rounding(values, form) == pytest.approx(one_rounding(few, form))
    error, once, overflowed = compare_sum(values * 1.1, values, torch.zeros_like(values), form)
    assert (error, overflowed) == (pytest.approx(0.1), 0)
    assert once == pytest.approx(one_rounding(few, form) / float(few.norm()))


def test_an_element_that_overflows_is_counted_and_not_measured() -> None:
    exact = torch.tensor([1.0, 70000.0, torch.inf], dtype=torch.float64)
    value = torch.tensor([1.0, torch.inf, torch.inf], dtype=torch.float64)
    error, _, overflowed = compare_sum(value, exact, torch.zeros(3, dtype=torch.float64), format_of("float16"))
    assert (error, overflowed) == (0.0, 1)
