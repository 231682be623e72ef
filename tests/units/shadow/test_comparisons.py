"""Promise: code that compares its own result with a reference of its own is no fault, and hides none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampcheck
from ampcheck.core.run import Run, Verdict
from ampcheck.shadow import Shadow

FORMATS = (torch.bfloat16, torch.float16)
X = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))

MEASURES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "difference": lambda low, wide: low - wide,
    "the other way round": lambda low, wide: wide - low,
    "beside the result": lambda low, wide: (low, low - wide),
    "in place": lambda low, wide: low.double().sub_(wide),
    "in place of the reference": lambda low, wide: wide.clone().sub_(low),
    "in the low format": lambda low, wide: (low - wide.to(low.dtype)).abs().mean(),
    "largest": lambda low, wide: (low - wide).abs().max(),
    "norm": lambda low, wide: torch.linalg.norm(low - wide),
    "mean of squares": lambda low, wide: ((low - wide) ** 2).mean(),
    "root of it": lambda low, wide: ((low - wide) ** 2).mean().sqrt(),
    "deviation": lambda low, wide: (low - wide).std(),
    "mse_loss": lambda low, wide: F.mse_loss(low.double(), wide),
    "l1_loss": lambda low, wide: F.l1_loss(low.float(), wide.float()),
    "smooth_l1_loss": lambda low, wide: F.smooth_l1_loss(low.float(), wide.float()),
    "dist": lambda low, wide: torch.dist(low.double(), wide),
    "relative": lambda low, wide: (low - wide).norm() / wide.norm(),
    "relative by element": lambda low, wide: ((low - wide).abs() / (wide.abs() + 1e-6)).mean(),
    "normalised": lambda low, wide: (low - wide) / (low - wide).norm(),
    "isclose": lambda low, wide: (low, torch.isclose(low.float(), wide.float(), rtol=1e-5)),
    "share beyond": lambda low, wide: ((low - wide).abs() > 1e-3).float().mean(),
    "divergence": lambda low, wide: F.kl_div(
        low.double().log_softmax(-1), wide.log_softmax(-1), log_target=True, reduction="batchmean"
    ),
    "largest by sort": lambda low, wide: (low - wide).abs().sort().values[-1],
    "as a number": lambda low, wide: (low, torch.tensor(float((low - wide).abs().max()))),
}
NOT_FOR_TRAINING: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "peak signal to noise": lambda low, wide: 10 * torch.log10(wide.abs().max() ** 2 / ((low - wide) ** 2).mean()),
    "signal to noise": lambda low, wide: wide.square().sum() / (low - wide).square().sum(),
    "logarithm": lambda low, wide: (low - wide).abs().log2(),
    "with an eps": lambda low, wide: torch.log10(1 / (((low - wide) ** 2).mean() + 1e-8)),
}


class Compared(nn.Module):
    """A network under autocast beside itself in float64."""

    def __init__(self, measure: Callable[[torch.Tensor, torch.Tensor], Any], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
        self.measure, self.dtype = measure, dtype

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", self.dtype):
            low = self.net(x)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            weights = {name: weight.double() for name, weight in self.net.named_parameters()}
            wide = torch.func.functional_call(self.net, weights, (x.double(),))
        return self.measure(low, wide)


def failures(run: Run) -> list[str]:
    return [f"{finding.check}: {finding.message}" for finding in run.of(Verdict.FAIL)]


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float16)], ids=str)
@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_of_the_own_error_is_no_fault(name: str, dtype: torch.dtype, device: str) -> None:
    run = ampcheck.audit((Compared(MEASURES[name], dtype), (X,)), device=device, dtype=dtype, compile=False)
    assert failures(run) == []


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", MEASURES | NOT_FOR_TRAINING)
def test_nor_is_it_in_evaluation(name: str, dtype: torch.dtype) -> None:
    model = Compared((MEASURES | NOT_FOR_TRAINING)[name], dtype)
    with ampcheck.watch(fail_on="never") as seen, torch.no_grad():
        model(X)
    assert failures(seen.run) == []


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_model_of_low_weights_beside_a_copy_of_them(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).to(dtype)
    with Shadow() as shadow, torch.no_grad():
        low = model(X.to(dtype))
        weights = {name: weight.double() for name, weight in model.named_parameters()}
        error = (low - torch.func.functional_call(model, weights, (X.to(dtype).double(),))).abs().max()
    assert float(error) > 0
    assert shadow.faults == ()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_fault_of_a_result_is_found_though_it_is_compared(dtype: torch.dtype) -> None:
    """Not even a bit of 1 - cos is right in 16 bits."""
    x = torch.linspace(0.001, 0.02, 64)
    with Shadow() as shadow:
        low = 1 - x.cos().to(dtype)
        (low - (1 - x.double().cos())).abs().max().item()
    assert [(fault.kind, fault.where.op) for fault in shadow.faults] == [("cancellation", "aten::rsub.Scalar")]


def test_an_overflow_is_found_though_it_is_compared() -> None:
    x = torch.full((8,), 300.0)
    with Shadow() as shadow:
        low = x.half().square()
        (low - x.double().square()).abs().max().item()
    assert [fault.kind for fault in shadow.faults] == ["overflow"]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_compensated_sum_stays_exact(dtype: torch.dtype) -> None:
    """What compensates is zero in float64, too, and its sum is not."""
    terms = torch.rand(200, 8, generator=torch.Generator().manual_seed(0))
    with Shadow() as shadow:
        total, lost = torch.zeros(8, dtype=dtype), torch.zeros(8, dtype=dtype)
        for term in terms.to(dtype):
            addend = term - lost
            new = total + addend
            lost = (new - total) - addend
            total = new
        exact = shadow.exact(total)
    torch.testing.assert_close(exact, terms.double().sum(0), rtol=1e-9, atol=0)
    assert shadow.faults == ()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_running_statistics_of_what_is_zero_are_no_comparison(dtype: torch.dtype) -> None:
    """They are written by an op whose result they are not."""
    norm = nn.BatchNorm1d(4).to(dtype)
    with Shadow() as shadow:
        for _ in range(4):
            norm(torch.full((8, 4), 3.8).to(dtype) - torch.full((8, 4), 3.8).double().to(dtype))
            norm((torch.full((8, 4), 3.8).to(dtype) - torch.full((8, 4), 3.8)).to(dtype))
    assert not [reason for reason in shadow.unruled if "not judged" in reason]


def test_a_check_of_16_bits_that_leaves_as_a_number_is_silent() -> None:
    """What every user's test contains: `assert (out - reference).abs().max().item() < tolerance`."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(64, 8), torch.randn(16, 64)
    with torch.no_grad():
        reference = model(x)
    with Shadow() as shadow, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = model(x)
        (out.float() - reference).abs().max().item()
        (out.float() - reference).norm().item()
        (out.softmax(-1).sum(-1) - 1).abs().max().item()
        (model(x)[:1] - model(x[:1])).abs().max().item()
        torch.nn.functional.mse_loss(out.float(), reference).item()
    assert not shadow.faults


def test_the_random_stream_is_that_of_a_run_without_a_shadow() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))

    def drawn() -> torch.Tensor:
        torch.manual_seed(0)
        error = x.bfloat16().float() - x
        torch.nn.functional.rrelu(error, training=True)
        torch.native_dropout(error, 0.5, True)
        return torch.rand(4)

    plain = drawn()
    with Shadow():
        assert torch.equal(drawn(), plain)


def test_digits_that_are_lost_behind_a_compensated_split_are_found() -> None:
    """Both parts of a split together are the value again, and no error of the run."""
    table = (1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2).cumprod(0)
    with Shadow() as shadow:
        high = table.bfloat16().float()
        again = high + (table - high)
        lost = (1 - again.bfloat16()[:4]).sqrt()
        shadow.reach({"output": lost})
    assert "aten::rsub.Scalar" in [fault.where.op for fault in shadow.faults]
