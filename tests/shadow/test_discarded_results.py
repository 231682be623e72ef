"""Results that code tests and discards do no harm; what it returns, and what it writes to weights, does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcheck.audit import audit
from ampcheck.core.run import Run, Verdict

TESTS: dict[str, Callable[[Tensor], bool]] = {
    "isfinite": lambda x: bool(x.isfinite().all()),
    "isnan and isinf": lambda x: not bool(x.isnan().any() or x.isinf().any()),
    "compares": lambda x: bool((x.abs() < torch.inf).all()),
}


def _failed(run: Run) -> set[str]:
    return {finding.check for finding in run.of(Verdict.FAIL)}


@pytest.mark.parametrize("name", TESTS)
def test_a_product_that_overflows_and_is_repeated_in_float32_passes(name: str) -> None:
    def product(repeats: bool) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        x, w = (60 * torch.randn(8, 64, generator=generator), 60 * torch.randn(64, 8, generator=generator))
        out = x.half() @ w.half()
        if not TESTS[name](out) and repeats:
            return x @ w
        return out

    assert not _failed(audit(lambda: product(repeats=True)))
    assert "overflow" in _failed(audit(lambda: product(repeats=False)))


def test_a_batch_whose_loss_is_not_finite_is_left_out_and_a_loop_that_leaves_out_all_fails() -> None:
    def train(broken: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for number in range(12):
            x = torch.randn(16, 8)
            with torch.autocast("cpu", torch.float16):
                output = model(x * (1e5 if number % 4 < broken else 1.0))
                loss = F.mse_loss(output.float(), x)
            if not torch.isfinite(loss):
                continue
            optimizer.zero_grad()
            (loss * 256).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= 256
            optimizer.step()

    assert "overflow" not in _failed(audit(lambda: train(1)))
    assert "overflow" in _failed(audit(lambda: train(4)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_nan_that_code_returns_fails_in_every_precision(dtype: torch.dtype) -> None:
    def normalise(guarded: bool) -> Tensor:
        x = torch.ones(4, 8).to(dtype)
        x[2] = 0
        rows = x / x.norm(dim=-1, keepdim=True)
        return rows.nan_to_num() if guarded else rows

    assert "nonfinite-reference" in _failed(audit(lambda: normalise(guarded=False)))
    assert not _failed(audit(lambda: normalise(guarded=True)))


@pytest.mark.parametrize("wide", [False, True], ids=["in half", "in float32"])
def test_an_update_that_vanishes_in_half_before_it_reaches_a_float32_weight_is_found(wide: bool) -> None:
    def train() -> None:
        torch.manual_seed(0)
        master, model = nn.Linear(8, 8), nn.Linear(8, 8).half()
        x = torch.randn(16, 8)
        for _ in range(6):
            model.zero_grad()
            (model(x.half()).float().square().mean() * 0.5).backward()
            with torch.no_grad():
                for weight, low in zip(master.parameters(), model.parameters(), strict=True):
                    assert low.grad is not None
                    gradient = low.grad.float() if wide else low.grad
                    weight.add_((gradient * -1e-5).float())
                    low.copy_(weight)

    found = _failed(audit(train)) & {"flush", "silent-zero"}
    assert bool(found) is not wide
