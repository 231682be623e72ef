"""Averages of 16 bits that no longer follow: found once, at their line, before the loss is larger than a rounding."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ampcheck
from ampcheck.core.run import Finding, Verdict

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CALLS = 36


class Codebook(nn.Module):
    """A block with a buffer that follows the mean of what passes through it."""

    def __init__(self, weight: float = 0.001) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((16,), 4.0))
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), self.weight)  # here
        return x + self.mean


def _batches(dtype: torch.dtype, calls: int = CALLS) -> Any:
    generator = torch.Generator().manual_seed(0)
    for _ in range(calls):
        yield (4.1 + 0.05 * torch.randn(64, 16, generator=generator)).to(dtype)


def buffer_in_a_block(dtype: torch.dtype, weight: float = 0.001) -> None:
    block = Codebook(weight).to(dtype)
    for x in _batches(dtype):
        block(x)


def decay_then_add(dtype: torch.dtype, weight: float = 0.001) -> None:
    mean = torch.full((16,), 4.0, dtype=dtype)
    for x in _batches(dtype):
        mean.mul_(1.0 - weight).add_(x.mean(0), alpha=weight)  # here


def local_variable(dtype: torch.dtype, weight: float = 0.001) -> torch.Tensor:
    mean = torch.full((16,), 4.0, dtype=dtype)
    for x in _batches(dtype):
        mean = (1.0 - weight) * mean + weight * x.mean(0)  # here
    return mean


def foreach(dtype: torch.dtype, weight: float = 0.001) -> None:
    means = [torch.full((16,), 4.0, dtype=dtype), torch.full((4,), 2.0, dtype=dtype)]
    for x in _batches(dtype):
        torch._foreach_lerp_(means, [x.mean(0), x.mean(0)[:4] / 2], weight)  # here


def batch_norm(dtype: torch.dtype, weight: float = 0.001) -> None:
    norm = nn.BatchNorm1d(16, momentum=weight).to(dtype)
    for x in _batches(dtype):
        norm((x - 4.0) * 21.0)  # here


def less_a_part_of_the_difference(dtype: torch.dtype, weight: float = 0.001) -> None:
    mean = torch.full((16,), 4.0, dtype=dtype)
    for x in _batches(dtype):
        mean.sub_(weight * (mean - x.mean(0)))  # here


def plus_a_part_of_the_difference(dtype: torch.dtype, weight: float = 0.001) -> None:
    """By a factor that is a tensor."""
    mean, rate = torch.full((16,), 4.0, dtype=dtype), torch.tensor(weight)
    for x in _batches(dtype):
        mean.add_((x.mean(0) - mean) * rate)  # here


def scaled_difference(dtype: torch.dtype, weight: float = 0.001) -> None:
    mean = torch.full((16,), 4.0, dtype=dtype)
    for x in _batches(dtype):
        mean.add_(x.mean(0) - mean, alpha=weight)  # here


def foreach_difference(dtype: torch.dtype, weight: float = 0.001) -> None:
    means = [torch.full((16,), 4.0, dtype=dtype), torch.full((4,), 2.0, dtype=dtype)]
    for x in _batches(dtype):
        apart = torch._foreach_sub(means, [x.mean(0), x.mean(0)[:4] / 2])
        torch._foreach_sub_(means, torch._foreach_mul(apart, weight))  # here


def copied_back(dtype: torch.dtype, weight: float = 0.001) -> None:
    mean = torch.full((16,), 4.0, dtype=dtype)
    for x in _batches(dtype):
        mean.copy_(torch.lerp(mean, x.mean(0), weight))  # here


def copied_back_from_float32(dtype: torch.dtype, weight: float = 0.001) -> None:
    mean = torch.full((16,), 4.0, dtype=dtype)
    for x in _batches(dtype):
        mean.copy_(mean.float().lerp(x.mean(0).float(), weight))  # here


AVERAGES: tuple[Callable[..., Any], ...] = (
    buffer_in_a_block,
    decay_then_add,
    local_variable,
    foreach,
    batch_norm,
    less_a_part_of_the_difference,
    plus_a_part_of_the_difference,
    scaled_difference,
    foreach_difference,
    copied_back,
    copied_back_from_float32,
)
FOLLOWING = tuple(function for function in AVERAGES if function not in (decay_then_add, batch_norm))


def found(function: Callable[..., Any], *args: Any) -> list[Finding]:
    with ampcheck.watch(fail_on="never") as watched:
        function(*args)
    return [f for f in watched.run.findings if f.verdict is Verdict.FAIL]


def _line(function: Callable[..., Any]) -> int:
    lines, first = inspect.getsourcelines(Codebook.forward if function is buffer_in_a_block else function)
    return first + next(number for number, text in enumerate(lines) if text.rstrip().endswith("# here"))


@pytest.mark.every(4)
@pytest.mark.parametrize("function", AVERAGES, ids=lambda function: function.__name__)
def test_an_average_whose_writes_change_nothing_is_found_at_its_line(function: Callable[..., Any]) -> None:
    findings = found(function, B16)
    assert {(f.where.file.rpartition("/")[2], f.where.line) for f in findings} == {
        (__file__.rpartition("/")[2], _line(function))
    }
    assert any("its last writes changed nothing" in f.message for f in findings)
    assert any((f.observed or 0.0) > 1.0 for f in findings)


@pytest.mark.every(6)
@pytest.mark.parametrize("function", AVERAGES, ids=lambda function: function.__name__)
def test_the_same_in_float32_is_silent(function: Callable[..., Any]) -> None:
    assert not found(function, F32)


@pytest.mark.every(4)
@pytest.mark.parametrize("function", FOLLOWING, ids=lambda f: f.__name__)
def test_an_average_that_follows_closely_is_silent(function: Callable[..., Any]) -> None:
    assert not found(function, B16, 0.1)
    if "difference" not in function.__name__:  # which has few digits in float16, and none of them counts later
        assert not found(function, F16, 0.05)


def test_a_value_that_is_set_again_and_again_is_silent() -> None:
    def change() -> None:
        mean = torch.full((16,), 4.0, dtype=B16)
        for x in _batches(B16, 60):
            mean.copy_(x.mean(0).float())

    assert not found(change)


def test_a_weight_that_a_gradient_no_longer_moves_is_no_average() -> None:
    """What is added is made of the weight, and not along a line."""

    def change() -> None:
        weight = torch.full((16,), 4.0, dtype=B16)
        for _ in range(60):
            weight.sub_(weight.tanh(), alpha=1e-5)

    assert not found(change)


def test_a_few_calls_say_nothing_yet() -> None:
    def change() -> None:
        mean = torch.full((16,), 4.0, dtype=B16)
        for x in _batches(B16, 8):
            mean.lerp_(x.mean(0), 0.001)

    assert not found(change)
