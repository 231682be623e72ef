"""Promise: an eps that code takes from its format is judged by that of float32; elsewhere the number is a number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampcheck.shadow import Shadow

LOW = (torch.float16, torch.bfloat16)


def _normalised(x: Tensor) -> Tensor:
    return x / (x.norm(dim=-1, keepdim=True) + torch.finfo(x.dtype).eps)


def _log_odds(x: Tensor) -> Tensor:
    eps = torch.finfo(x.dtype).eps
    return torch.special.logit(x.clamp(eps, 1 - eps))


def _log_probability(x: Tensor) -> Tensor:
    return torch.distributions.Categorical(probs=x, validate_args=False).log_prob(torch.zeros(len(x)))


QUIET = 1e-4 * torch.linspace(1, 2, 16).reshape(2, 8)
SMALL = torch.tensor([[1e-4, 0.9], [2e-4, 0.8]])
CASES = [(_normalised, QUIET), (_log_odds, SMALL), (_log_probability, SMALL)]


def _lost(run: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    with Shadow() as shadow:
        result = run(x)
    assert result.isfinite().all()
    return any(fault.reaches for fault in shadow.faults)


@pytest.mark.parametrize(("run", "x"), CASES)
@pytest.mark.parametrize("low", LOW)
def test_an_eps_of_the_format_that_is_large_for_the_values_is_found(
    run: Callable[[Tensor], Tensor], x: Tensor, low: torch.dtype
) -> None:
    x = x.to(low)
    difference = (run(x).float() - run(x.float())).abs()
    assert (difference > 0.1 * run(x.float()).abs()).any()
    assert _lost(run, x)


@pytest.mark.parametrize(("run", "x"), CASES)
@pytest.mark.parametrize("low", LOW)
def test_the_same_in_float32_behind_rounded_values_passes(
    run: Callable[[Tensor], Tensor], x: Tensor, low: torch.dtype
) -> None:
    assert not _lost(lambda x: run(x.float()), x.to(low))


@pytest.mark.parametrize("low", LOW)
def test_an_eps_of_the_format_that_is_small_for_the_values_passes(low: torch.dtype) -> None:
    assert not _lost(_normalised, torch.linspace(1, 2, 16).reshape(2, 8).to(low))


@pytest.mark.parametrize("low", LOW)
def test_the_same_number_by_itself_is_a_choice(low: torch.dtype) -> None:
    number = torch.finfo(low).eps
    assert not _lost(lambda x: x / (x.norm(dim=-1, keepdim=True) + number), QUIET.to(low))


def _masked_and_damped(x: Tensor) -> Tensor:
    return (x * 0.01).masked_fill(x > 3, torch.finfo(x.dtype).min)


def _leaky(x: Tensor) -> Tensor:
    return torch.nn.functional.leaky_relu(x, 0.001).clamp(max=torch.finfo(x.dtype).max)


@pytest.mark.parametrize("run", [_masked_and_damped, _leaky])
@pytest.mark.parametrize("low", LOW)
def test_a_round_number_beside_a_mask_of_the_format_is_a_choice(
    run: Callable[[Tensor], Tensor], low: torch.dtype
) -> None:
    assert not _lost(run, torch.linspace(-4, 2, 16).to(low))


def test_the_finding_says_which_number_the_code_takes_and_which_float32_has() -> None:
    with Shadow() as shadow:
        result = _normalised(QUIET.bfloat16())
    assert result.isfinite().all()
    (fault,) = {fault.note for fault in shadow.faults if fault.reaches}
    assert fault == "the code takes 0.00781 from its format, where float32 takes 1.19e-07"
