"""Uniform numbers that are drawn in 16 bits: an infinity of the lower end is found, and all honest uses are silent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ampcheck.audit import audit
from ampcheck.core.run import Verdict

FORMATS = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
Function = Callable[[torch.dtype], torch.Tensor]


def _audited(function: Function, dtype: torch.dtype) -> list[str]:
    """The checks that fail or warn in a run of the function."""

    def run() -> torch.Tensor:
        torch.manual_seed(0)
        return function(dtype)

    found = audit(run).findings
    return [f"{f.verdict.name} {f.check}" for f in found if f.verdict in (Verdict.FAIL, Verdict.WARN)]


def _gumbel(dtype: torch.dtype) -> torch.Tensor:
    uniform = torch.rand(8000, dtype=dtype)
    return -torch.log(-torch.log(uniform))


def _truncated_normal(dtype: torch.dtype) -> torch.Tensor:
    weight = torch.empty(8000, dtype=dtype).uniform_(-1, 1)
    return weight.erfinv_().mul_(0.02).clamp_(-2, 2)


def _reciprocal_of_a_wider_copy(dtype: torch.dtype) -> torch.Tensor:
    return 1 / (2 * torch.rand_like(torch.empty(80, 100, dtype=dtype)).float())


def _eps_that_is_zero(dtype: torch.dtype) -> torch.Tensor:
    return torch.rand(8000, dtype=dtype).mul_(1 - 1e-50).add_(1e-50).log_()


@pytest.mark.every(3)
@FORMATS
@pytest.mark.parametrize("function", [_gumbel, _truncated_normal, _reciprocal_of_a_wider_copy, _eps_that_is_zero])
def test_an_infinity_of_the_lower_end_of_a_draw_is_found_where_float32_has_none(
    function: Function, low: torch.dtype
) -> None:
    assert "FAIL overflow" in _audited(function, low)
    assert not _audited(function, torch.float32)


@FORMATS
def test_an_infinity_that_a_softmax_absorbs_is_a_warning(low: torch.dtype) -> None:
    assert _audited(lambda dtype: _gumbel(dtype).softmax(0), low) == ["WARN overflow"]


@FORMATS
def test_a_run_that_draws_no_lower_end_warns_of_those_that_do(low: torch.dtype) -> None:
    def few(dtype: torch.dtype) -> torch.Tensor:
        return torch.rand(4, dtype=dtype).log()

    assert _audited(few, low) == ["WARN overflow"]
    assert not _audited(few, torch.float32)


def _dropout(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(100, 64).to(dtype)
    return x * (torch.rand_like(x) > 0.1) / 0.9


def _noise(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(100, 64).to(dtype)
    return x + 0.1 * torch.rand_like(x) + 0.1 * torch.randn_like(x)


def _initial_weights(dtype: torch.dtype) -> torch.Tensor:
    layer = torch.nn.Linear(64, 64).to(dtype)
    torch.nn.init.uniform_(layer.weight, -0.1, 0.1)
    return layer(torch.ones(3, 64, dtype=dtype))


def _stochastic_rounding(dtype: torch.dtype) -> torch.Tensor:
    x = 100 * torch.randn(4000).to(dtype).sigmoid()
    return (x + torch.rand_like(x)).floor()


def _times(dtype: torch.dtype) -> torch.Tensor:
    time = 1000 * torch.rand(4000, dtype=dtype)
    phase = time[:, None].float() * torch.logspace(0, -4, 16)
    return torch.cat([phase.sin(), phase.cos()], -1)


def _gumbel_with_eps(dtype: torch.dtype) -> torch.Tensor:
    uniform = torch.rand(8000, dtype=dtype)
    return -torch.log(-torch.log(uniform + 1e-6) + 1e-6)


def _gumbel_clamped(dtype: torch.dtype) -> torch.Tensor:
    uniform = torch.rand(8000, dtype=dtype).clamp_(min=1e-4)
    return -torch.log(-torch.log(uniform))


def _gumbel_replaced(dtype: torch.dtype) -> torch.Tensor:
    uniform = torch.rand(8000, dtype=dtype)
    uniform = uniform.masked_fill(uniform < 1e-4, 1e-4)
    return uniform.log()


def _exponential(dtype: torch.dtype) -> torch.Tensor:
    return -torch.empty(8000, dtype=dtype).exponential_().log()


def _zeros_of_a_triangle(dtype: torch.dtype) -> torch.Tensor:
    return torch.exp(torch.log(torch.tril(torch.rand(64, 64, dtype=dtype).clamp_(min=0.01))))


def _far_from_its_infinity(dtype: torch.dtype) -> torch.Tensor:
    return (torch.rand(8000, dtype=dtype) + 1).log() + torch.empty(8000, dtype=dtype).uniform_(0.5, 2).reciprocal()


def _overwritten(dtype: torch.dtype) -> torch.Tensor:
    uniform = torch.rand(8000, dtype=dtype)
    uniform.copy_(torch.linspace(1, 2, 8000))
    return uniform.log()


def _filled(dtype: torch.dtype) -> torch.Tensor:
    return torch.rand(8000, dtype=dtype).fill_(0.5).log()


HONEST = [
    _dropout, _noise, _initial_weights, _stochastic_rounding, _times, _gumbel_with_eps, _gumbel_clamped,
    _gumbel_replaced, _exponential, _zeros_of_a_triangle, _far_from_its_infinity, _overwritten, _filled,
]  # fmt: skip


@pytest.mark.every(3)
@FORMATS
@pytest.mark.parametrize("function", HONEST)
def test_draws_of_which_nothing_becomes_infinite_are_silent(function: Function, low: torch.dtype) -> None:
    assert not [found for found in _audited(function, low) if found.startswith("FAIL") or "overflow" in found]


def _drop(rate: float, dtype: torch.dtype) -> torch.Tensor:
    return (torch.rand(200_000, dtype=dtype) >= rate).float().mean()


@pytest.mark.every(2)
@FORMATS
def test_a_rate_finer_than_a_draw_is_a_decision_that_is_missed(low: torch.dtype) -> None:
    number = 256 if low is torch.bfloat16 else 2048
    rare = 0.25 / number
    assert "FAIL precision-loss" in _audited(lambda dtype: _drop(rare, dtype), low)
    assert "FAIL precision-loss" in _audited(lambda dtype: _drop(1 - rare, dtype), low)
    for rate in (rare * 16, 0.1, 0.5, 0.9, 0.0, 1e-6):  # one in a million is not asked of 200,000
        assert not _audited(lambda dtype, rate=rate: _drop(rate, dtype), low), rate
    assert not _audited(lambda dtype: _drop(rare, dtype), torch.float32)
