"""Every arm sees the same random numbers, whatever its dtype; the caller's streams are left as they were."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ampcheck.core.formats import format_of
from ampcheck.numerics.equal_random import EqualRandom, seeded

DRAWS = {
    "randn": lambda dtype: torch.randn(40, dtype=dtype),
    "rand_like": lambda dtype: torch.rand_like(torch.ones(40, dtype=dtype)),
    "normal_": lambda dtype: torch.empty(40, dtype=dtype).normal_(1, 2),
    "bernoulli": lambda dtype: torch.bernoulli(torch.full((40,), 0.5, dtype=dtype)),
    "dropout": lambda dtype: F.dropout(torch.ones(40, dtype=dtype), 0.5),
    "exponential_": lambda dtype: torch.empty(40, dtype=dtype).exponential_(),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_draw_is_the_same_in_every_dtype(draw: str, dtype: torch.dtype) -> None:
    with seeded(seed=3), EqualRandom() as mode:
        wide = DRAWS[draw](torch.float32)
        assert mode.drew
    with seeded(seed=3), EqualRandom():
        other = DRAWS[draw](dtype)
    assert other.dtype is dtype
    if draw == "rand_like" and dtype.itemsize == 2:  # on the coarser grid of the format, as torch draws there
        steps = format_of(dtype).largest_exact_integer
        assert torch.equal(other, ((wide * steps).floor() / steps).to(dtype))
    else:
        assert torch.equal(other, wide.to(dtype))


@pytest.mark.parametrize("draw", DRAWS)
def test_a_wide_run_can_be_given_the_numbers_of_a_narrow_one(draw: str) -> None:
    with seeded(seed=3), EqualRandom():
        narrow = DRAWS[draw](torch.bfloat16)
    with seeded(seed=3), EqualRandom(rounded_to=torch.bfloat16):
        wide = DRAWS[draw](torch.float64)
    assert torch.equal(wide, narrow.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_uniform_numbers_of_16_bits_reach_zero_and_never_one(dtype: torch.dtype) -> None:
    with seeded(seed=3), EqualRandom():
        drawn = torch.rand(100_000, dtype=dtype)
        ranged = torch.empty(100_000, dtype=dtype).uniform_(0, 4)
    with seeded(seed=3):
        real = torch.rand(100_000, dtype=dtype)
    assert float(drawn.max()) == float(real.max()) < 1
    assert float(drawn.min()) == float(real.min()) == 0
    assert 0 <= float(ranged.min()) < float(ranged.max()) < 4


def test_without_it_the_draws_differ_so_the_promise_is_not_empty() -> None:
    with seeded(seed=3):
        wide = torch.randn(40)
    with seeded(seed=3):
        assert not torch.equal(torch.randn(40, dtype=torch.float64).float(), wide)


def test_attention_without_dropout_draws_nothing() -> None:
    q = torch.randn(1, 2, 4, 8)
    with EqualRandom() as mode:
        F.scaled_dot_product_attention(q, q, q)
        F.dropout(q, 0.5, training=False)
    assert not mode.drew


def test_the_callers_streams_go_on_as_if_nothing_had_been_drawn() -> None:
    def next_draws() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = next_draws()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    with seeded(seed=7):
        next_draws()
    assert next_draws() == expected
