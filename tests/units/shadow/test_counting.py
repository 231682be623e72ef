"""Promise: a count that stops at the end of the integers of its format is found, however it is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import one_hot

from ampcheck.shadow import Shadow

B16, F16 = torch.bfloat16, torch.float16
END = {B16: 256, F16: 2048}
"""Every integer up to this is one of the format."""


def _index(count: int) -> torch.Tensor:
    return torch.randint(0, 4, (count,), generator=torch.Generator().manual_seed(0))


def by_histc(dtype: torch.dtype, count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(0)).to(dtype).histc(4, 0, 1)


def by_index_add(dtype: torch.dtype, count: int) -> torch.Tensor:
    return torch.zeros(4, dtype=dtype).index_add_(0, _index(count), torch.ones(count, dtype=dtype))


def by_index_put(dtype: torch.dtype, count: int) -> torch.Tensor:
    ones = torch.ones(count, dtype=dtype)
    return torch.zeros(4, dtype=dtype).index_put_((_index(count),), ones, accumulate=True)


def by_scatter_add(dtype: torch.dtype, count: int) -> torch.Tensor:
    return torch.zeros(4, dtype=dtype).scatter_add_(0, _index(count), torch.ones(count, dtype=dtype))


def by_sum(dtype: torch.dtype, count: int) -> torch.Tensor:
    return one_hot(_index(count), 4).to(dtype).sum(0)


def by_product(dtype: torch.dtype, count: int) -> torch.Tensor:
    return torch.ones(1, count, dtype=dtype) @ one_hot(_index(count), 4).to(dtype)


def by_cumsum(dtype: torch.dtype, count: int) -> torch.Tensor:
    return (_index(count) == 0).to(dtype).cumsum(0)


def by_adding_one(dtype: torch.dtype, count: int) -> torch.Tensor:
    total = torch.zeros((), dtype=dtype)
    for _ in range(count // 4):
        total = total + 1
    return total


def by_adding_in_place(dtype: torch.dtype, count: int) -> torch.Tensor:
    totals = torch.zeros(4, dtype=dtype)
    for row in one_hot(_index(count), 4).to(dtype).view(-1, 4, 4).sum(1):
        totals += row
    return totals


WAYS: tuple[Callable[[torch.dtype, int], torch.Tensor], ...] = (
    by_histc, by_index_add, by_index_put, by_scatter_add, by_sum, by_product, by_cumsum, by_adding_one,
    by_adding_in_place,
)  # fmt: skip


@pytest.mark.parametrize("dtype", END, ids=str)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_count_that_stops_fails_and_one_that_does_not_is_silent(
    way: Callable[[torch.dtype, int], torch.Tensor], dtype: torch.dtype
) -> None:
    """The oracle: the same count in float64. Some kernels add in float32, and are right."""
    for part in (0.5, 2):
        count = int(part * 4 * END[dtype]) // 16 * 16
        with Shadow() as shadow:
            counted = way(dtype, count)
            counted.sum(dtype=torch.float64).item()
        wide = way(torch.float64, count)
        error = float((counted.double() - wide).norm() / wide.norm())
        kinds = {fault.kind for fault in shadow.faults}
        assert bool(kinds) == (error > 0.05 or "collision" in kinds), f"{error:.2g} off, {kinds}"
        if part < 1:
            assert not kinds


@pytest.mark.parametrize("dtype", END, ids=str)
@pytest.mark.parametrize("bins", [10, 100])
def test_values_in_the_next_bin_are_no_lost_count(dtype: torch.dtype, bins: int) -> None:
    """A format has few values beside an edge, and which bin takes one of them is a decision."""
    with Shadow() as shadow:
        x = torch.randn(500, generator=torch.Generator().manual_seed(0)).to(dtype)
        counts = x.histc(bins, -4, 4)
    assert float(counts.max()) < END[B16]
    assert shadow.faults == ()
