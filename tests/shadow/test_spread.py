"""Promise: honest errors that one sample of moved data does not show are no faults; op by op, lost digits still are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ampcheck import Verdict, audit
from ampcheck.shadow import Shadow


def orthogonal(gradient: torch.Tensor) -> torch.Tensor:
    """The iteration of Muon, by which all singular values come near 1."""
    x = gradient.bfloat16() / (gradient.norm() + 1e-7).bfloat16()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Makes gradients orthogonal in bfloat16; that of a last layer has a singular value that is zero by mathematics."""

    def __init__(self, parameters: list[nn.Parameter], *, cancels: bool) -> None:
        super().__init__(parameters, {"lr": 2e-2})
        self.cancels = cancels

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if self.cancels:
                low = (1000 + parameter.grad / parameter.grad.norm()).bfloat16() - 1000
                parameter.grad.copy_(low * parameter.grad.norm())
            parameter.add_(orthogonal(parameter.grad).to(parameter.dtype), alpha=-2e-2)


def lost_digits(seed: int, *, cancels: bool = False) -> set[str]:
    def main() -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
        optimizer, x = Muon(list(model.parameters()), cancels=cancels), torch.randn(16, 16)
        for _ in range(8):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(x)
            F.cross_entropy(logits.float(), torch.arange(16) % 4).backward()
            optimizer.step()

    return {finding.where.op for finding in audit(main, checks=["precision-loss"]).of(Verdict.FAIL)}


@pytest.mark.parametrize("seed", range(4))
def test_an_iteration_that_enlarges_small_singular_values_is_no_fault(seed: int) -> None:
    assert not lost_digits(seed)


def test_digits_that_an_optimizer_loses_of_gradients_are_found() -> None:
    assert lost_digits(0, cancels=True)


def cancelled(share: float, dtype: torch.dtype, seed: int) -> list[str]:
    """The faults of the gradient of a bias of which `share` of the terms is left."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(64, 1, generator=generator)
    weights -= (1 - share) * weights.mean()
    bias, x = nn.Parameter(torch.zeros(1)), torch.randn(64, 1, generator=generator)
    with Shadow() as shadow:
        gradients = (x + bias).to(dtype) * 1.0
        (gradients.float() * weights).sum().backward()
        shadow.reach({}, {"bias": bias.grad}) if bias.grad is not None else None
    return [fault.where.op for fault in shadow.faults if fault.reaches]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_a_bias_that_cancels_is_no_fault(dtype: torch.dtype) -> None:
    assert [seed for seed in range(40) if cancelled(1e-3, dtype, seed)] == []


def test_a_sum_of_gradients_that_adds_in_16_bits_is_found() -> None:
    """The running sum of 4,096 terms of bfloat16 stops at 256 of them."""

    class Adds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, bias: torch.Tensor) -> torch.Tensor:
            return bias.expand(4096).clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient.bfloat16().cumsum(0)[-1:]

    bias = nn.Parameter(torch.ones(1))
    with Shadow() as shadow:
        Adds.apply(bias).sum().backward()
        assert bias.grad is not None
        shadow.reach({}, {"bias": bias.grad})
    wrong = abs(float(bias.grad) - 4096) > 0.1 * 4096
    assert bool([fault for fault in shadow.faults if fault.reaches]) == wrong
