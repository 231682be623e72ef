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


def cancelled(dtype: torch.dtype, seed: int) -> list[str]:
    """The faults of the gradient of a bias, whose terms are whole numbers by 3 that cancel up to one of them."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-30, 31, (64, 1), generator=generator).float()
    numbers[0] += 1 - numbers.sum()
    bias, x = nn.Parameter(torch.zeros(1)), torch.zeros(64, 1)
    with Shadow() as shadow:
        ((x + bias).to(dtype).float() * (numbers / 3)).sum().backward()
        assert bias.grad is not None
        shadow.reach({}, {"bias": bias.grad})
    return [fault.where.op for fault in shadow.faults if fault.reaches]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_a_bias_whose_terms_cancel_is_no_fault(dtype: torch.dtype) -> None:
    """The data are whole numbers, of which nothing is rounded before they become terms."""
    assert [seed for seed in range(40) if cancelled(dtype, seed)] == []


def test_terms_that_all_lose_the_same_digit_are_found_in_their_sum() -> None:
    """Roundings of terms that are independent cancel as well; these do not."""
    weights = torch.full((1 << 18, 1), 1 + 2.0**-9)
    weights[::2] = -1.0
    bias = nn.Parameter(torch.zeros(1))
    with Shadow() as shadow:
        ((torch.zeros(1 << 18, 1) + bias).bfloat16().float() * weights).sum().backward()
        assert bias.grad is not None
        shadow.reach({}, {"bias": bias.grad})
    assert float(bias.grad) == 0.0
    assert [fault.where.op for fault in shadow.faults if fault.reaches] == ["aten::sum.dim_IntList"]


@pytest.mark.parametrize("seed", [0, 3])
def test_rows_of_gradients_that_are_small_beside_the_others_may_be_unscaled(seed: int) -> None:
    """A gradient is one tensor, also where a `GradScaler` divides it."""
    torch.manual_seed(seed)
    with Shadow() as shadow:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        x = torch.randn(32, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5 * (seed % 2))
        scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
        for _ in range(48):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                out = model(x)
            scaler.scale(F.mse_loss(out.float(), x.sum(1, keepdim=True))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [fault for fault in shadow.faults if fault.reaches] == []
