"""Strategies stay in the range that was asked for, and a range that cannot be met is told where it is written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ampcheck import UsageError
from ampcheck.strategies import (
    as_code,
    cancelling_pairs,
    heavy_tails,
    log_uniform,
    masks,
    outlier_channels,
    tensors,
)


@settings(max_examples=30)
@given(outlier_channels("float16", shape=(4, 3), factor=1e3, scale=100.0))
def test_outlier_channels_are_finite(x: torch.Tensor) -> None:
    assert bool(x.isfinite().all())


@settings(max_examples=30)
@given(outlier_channels("float32", shape=(64, 2), factor=1e6))
def test_no_channel_is_an_outlier_twice(x: torch.Tensor) -> None:
    assert float(x.abs().max()) < 1e8  # normal numbers stay below 100 deviations


@settings(max_examples=30)
@given(heavy_tails("float16", shape=(16, 16), scale=100.0))
def test_heavy_tails_are_finite(x: torch.Tensor) -> None:
    assert bool(x.isfinite().all())


@settings(max_examples=50)
@given(cancelling_pairs("float16", min_value=-1, max_value=10))
def test_pairs_cancel_in_a_lopsided_range(pair: tuple[float, float]) -> None:
    one, other = pair
    assert min(pair) >= -1
    assert max(pair) <= 10
    assert abs(one + other) <= 5 * math.ulp(1) + abs(one) * 2.0**-7 + 2.0**-21


def test_masks_hide_other_keys_than_the_last() -> None:
    found = []

    @settings(max_examples=100, database=None, derandomize=True)
    @given(masks((2, 4)))
    def draw(mask: torch.Tensor) -> None:
        assert bool(mask.any(-1).all())
        found.append(mask)

    draw()
    assert any(bool((~mask[:, :-1] & mask[:, 1:]).any()) for mask in found)
    assert any(bool(mask.all()) for mask in found)


@pytest.mark.parametrize(("low", "high"), [(0.5, 1.0), (0.9, 1.1), (1.0, 1025.0)])
def test_the_ends_of_a_log_uniform_range_are_as_rare_as_the_rest(low: float, high: float) -> None:
    found: Counter[float] = Counter()

    @settings(max_examples=300, database=None, derandomize=True)
    @given(log_uniform(low, high, signed=False))
    def draw(x: float) -> None:
        assert low <= x <= high
        found[x] += 1

    draw()
    assert found[high] < sum(found.values()) / 10


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: tensors("int64", min_value=5, max_value=-5),
        lambda: tensors("int64", min_value=0.5, max_value=0.9),
        lambda: tensors("int64", max_value=math.inf),
        lambda: tensors("uint8", max_value=300),
        lambda: tensors("uint8", max_value=-5),
        lambda: tensors("bool", min_value=0),
        lambda: tensors("float16", min_value=2, max_value=1),
        lambda: tensors("float16", shape=-2),
        lambda: tensors("float16", shape="abc"),  # type: ignore[arg-type]
        lambda: tensors("float16", shape=(2, 1.5)),  # type: ignore[arg-type]
        lambda: tensors("complex64"),
        lambda: cancelling_pairs("float16", min_value=0, max_value=10),
    ],
)
def test_what_cannot_be_drawn_is_told_where_it_is_written(wrong: Callable[[], Any]) -> None:
    with pytest.raises(UsageError):
        wrong()


@pytest.mark.parametrize(
    ("dtype", "low", "high", "least", "most"),
    [("int64", None, -5, -132, -5), ("int64", 200, None, 200, 327), ("uint8", 200, None, 200, 255)],
)
@settings(max_examples=30)
@given(data=st.data())
def test_one_bound_of_integers_is_enough(
    dtype: str, low: int | None, high: int | None, least: int, most: int, data: st.DataObject
) -> None:
    x = data.draw(tensors(dtype, shape=3, min_value=low, max_value=high))
    assert least <= int(x.min()) <= int(x.max()) <= most


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([complex(math.nan, -math.inf), complex(-0.0, 1), complex(1, -0.0)]),
        torch.tensor(complex(0.1, -0.0), dtype=torch.complex128),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
    ],
    ids=["special", "scalar", "conjugate"],
)
def test_complex_numbers_are_printed_bit_for_bit(x: torch.Tensor) -> None:
    again = eval(as_code(x), {"torch": torch})
    assert again.dtype is x.dtype
    seen, wanted = (torch.view_as_real(t.resolve_conj()) for t in (again, x))
    assert torch.equal(seen.isnan(), wanted.isnan())
    assert torch.equal(seen.signbit() & ~seen.isnan(), wanted.signbit() & ~wanted.isnan())
    assert torch.equal(seen.nan_to_num(), wanted.nan_to_num())


def test_a_tensor_that_requires_its_gradient_is_printed_so() -> None:
    x = torch.ones(2, requires_grad=True)
    assert eval(as_code(x), {"torch": torch}).requires_grad
    assert "requires_grad" not in as_code(x.detach())
