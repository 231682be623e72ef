"""A term of a sum that 16 bits make zero throughout is missing, though the sum itself may look right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampcheck import Run, Verdict, audit

SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "add": lambda x, noise, share: x + share.sqrt() * noise,
    "sub": lambda x, noise, share: x - share.sqrt() * noise,
    "alpha": lambda x, noise, share: torch.add(x, share.sqrt() * noise, alpha=2),
    "addcmul": lambda x, noise, share: torch.addcmul(x, noise, share.sqrt()),
    "in place": lambda x, noise, share: x.clone().add_(share.sqrt() * noise),
    "lerp": lambda x, noise, share: torch.lerp(x, noise, share.sqrt()),
}


def _noisy(sum_of: Callable[[Tensor, Tensor, Tensor], Tensor], kept: float, wide: bool) -> Run:
    """Mix values with noise whose share of the variance is `1 - kept`, computed in bfloat16 or in float32."""
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(8, 32, generator=generator).bfloat16() for _ in range(2))

    def mix() -> Tensor:
        part = torch.tensor([kept])
        share = 1 - (part if wide else part.bfloat16())
        return sum_of(x, noise, share.bfloat16())

    return audit(mix)


@pytest.mark.parametrize("name", SUMS)
def test_noise_that_vanishes_from_a_sample_is_found_and_a_table_in_float32_passes(name: str) -> None:
    narrow = _noisy(SUMS[name], 0.9985, wide=False)
    assert {f.check for f in narrow.of(Verdict.FAIL)} & {"precision-loss", "silent-zero"}
    assert not _noisy(SUMS[name], 0.9985, wide=True).failed


@pytest.mark.parametrize("name", SUMS)
def test_a_term_below_the_roundings_of_its_sum_is_none(name: str) -> None:
    assert not _noisy(SUMS[name], 1 - 1e-5, wide=False).failed


def test_a_small_difference_that_guides_a_sample_passes() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(64, 64).bfloat16()
    x, moved = (torch.randn(4, 64, generator=generator).bfloat16() for _ in range(2))

    def guided() -> Tensor:
        without, with_text = layer(x), layer(x + 1e-3 * moved)
        return without + 7.5 * (with_text - without)

    assert not audit(guided).failed


def _average(wide: bool) -> Tensor:
    """One step of an average of weights whose decay is a tensor, as a buffer of a module that was cast is."""
    decay = torch.tensor(0.999)
    decay = decay if wide else decay.bfloat16()
    average, weight = (torch.randn(64, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1))
    return decay * average + (1 - decay) * weight * 60


def _second_moment(wide: bool) -> Tensor:
    """One step of an optimizer that keeps its betas as tensors in the dtype of the weights."""
    beta = torch.tensor([0.999])
    beta = beta if wide else beta.bfloat16()
    generator = torch.Generator().manual_seed(0)
    moment, gradient = (torch.rand(64, generator=generator).bfloat16() for _ in range(2))
    return (0.01 * moment * beta).addcmul(gradient * gradient, (1 - beta).to(gradient.dtype))


@pytest.mark.parametrize("code", [_average, _second_moment])
def test_a_share_that_rounds_to_one_leaves_the_other_term_out(code: Callable[[bool], Tensor]) -> None:
    narrow = audit(lambda: code(False))
    assert {f.check for f in narrow.of(Verdict.FAIL)} & {"precision-loss", "silent-zero"}
    assert not audit(lambda: code(True)).failed
