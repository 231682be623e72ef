"""Promise: a sum that is rounded to 16 bits at each step is found, however the code writes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampcheck.shadow import Shadow

STEPS = 700  # 256 is the largest count to which bfloat16 adds 1; of 0.7 it adds fewer

Sum = Callable[[torch.dtype], Tensor]


def _steps(dtype: torch.dtype) -> Tensor:
    return torch.full((STEPS, 4), 0.7, dtype=torch.bfloat16).to(dtype)


def rebound(dtype: torch.dtype) -> Tensor:
    total = torch.zeros(4, dtype=dtype)
    for step in _steps(dtype):
        total = total + step
    return total


def in_place(dtype: torch.dtype) -> Tensor:
    total = torch.zeros(4, dtype=dtype)
    for step in _steps(dtype):
        total += step
    return total


def part_in_place(dtype: torch.dtype) -> Tensor:
    totals = torch.zeros(3, 4, dtype=dtype)
    for step in _steps(dtype):
        totals[1] += step
    return totals


def part_assigned(dtype: torch.dtype) -> Tensor:
    totals = torch.zeros(3, 4, dtype=dtype)
    for step in _steps(dtype):
        totals[1] = totals[1] + step
    return totals


def parts_in_turn(dtype: torch.dtype) -> Tensor:
    totals = torch.zeros(2, 4, dtype=dtype)
    for index, step in enumerate(torch.cat([_steps(dtype)] * 2)):
        totals[index % 2] += step
    return totals


def running_sums(dtype: torch.dtype) -> Tensor:
    steps = _steps(dtype)
    sums = torch.zeros_like(steps)
    for index in range(1, STEPS):
        sums[index] = sums[index - 1] + steps[index]
    return sums


def copied_back(dtype: torch.dtype) -> Tensor:
    total = torch.zeros(4, dtype=dtype)
    for step in _steps(dtype):
        total.copy_(total + step)
    return total


def folded(dtype: torch.dtype) -> Tensor:
    return sum(_steps(dtype), torch.zeros(4, dtype=dtype))


SUMS = [rebound, in_place, part_in_place, part_assigned, parts_in_turn, running_sums, copied_back, folded]


def _drifts(run: Callable[[], Tensor]) -> bool:
    with Shadow() as shadow:
        result = run()
    assert result.isfinite().all()
    return any(fault.reaches for fault in shadow.faults)


@pytest.mark.parametrize("run", SUMS)
def test_a_sum_in_bfloat16_is_found(run: Sum) -> None:
    assert float(run(torch.bfloat16).max()) < 0.8 * float(run(torch.float32).max())
    assert _drifts(lambda: run(torch.bfloat16))


@pytest.mark.parametrize("run", SUMS)
def test_a_sum_in_float32_passes(run: Sum) -> None:
    assert not _drifts(lambda: run(torch.float32).bfloat16())


def _deep(seed: int, size: int) -> Tensor:
    """Values with the honest error of many layers in bfloat16."""
    torch.manual_seed(seed)
    x = torch.randn(64, size).bfloat16()
    for _ in range(24):
        x = torch.tanh(x @ (torch.randn(size, size) / size**0.5).bfloat16() * 1.4)
    return x


@pytest.mark.parametrize("seed", range(4))
def test_parts_that_are_each_written_once_are_no_accumulator(seed: int) -> None:
    def run() -> Tensor:
        layers, bias = _deep(seed, 32), torch.randn(32).bfloat16()
        for column in range(32):
            layers[:, column] += bias[column]
            layers[:, column] = layers[:, column] * 0.5
        return layers

    assert not _drifts(run)
