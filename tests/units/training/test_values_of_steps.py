"""The values of a loop that is handed over by its parts are judged op by op, as those of a callable are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ampcheck.audit import audit
from ampcheck.core.run import Run, Verdict
from ampcheck.training.values import VALUES

Extra = Callable[[nn.Module, torch.Tensor, torch.dtype], Any]


def _loop(extra: Extra, dtype: torch.dtype) -> dict[str, Any]:
    """Train in float32, and compute something beside it in another format. extra: of the model and its loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(8, 16), 30 * torch.randn(8, 4)
    kept: list[Any] = []

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        kept.append(extra(model, loss.detach(), dtype))
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step}


def _perplexity(model: nn.Module, loss: torch.Tensor, dtype: torch.dtype) -> float:
    return torch.exp((loss / 50).to(dtype)).item()


def _norm(model: nn.Module, loss: torch.Tensor, dtype: torch.dtype) -> float:
    gradients = [1000 * p.grad for p in model.parameters() if p.grad is not None]
    return torch.stack([g.to(dtype).square().sum() for g in gradients]).sum().sqrt().item()


def _rate(model: nn.Module, loss: torch.Tensor, dtype: torch.dtype) -> float:
    return (torch.tensor(3e-4).to(dtype) * torch.tensor(1e-5).to(dtype)).item()


def _share(model: nn.Module, loss: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    weight = next(model.parameters()).detach().to(dtype)
    return (weight + 1000) - 1000


PLANTED: dict[str, tuple[Extra, str]] = {
    "a metric": (_perplexity, "overflow"),
    "a norm of gradients": (_norm, "overflow"),
    "a learning rate": (_rate, "silent-zero"),
    "digits of weights": (_share, "precision-loss"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_16_bits_lose_in_a_step_fails_at_its_line_and_passes_in_float32(name: str) -> None:
    extra, check = PLANTED[name]
    found = {f.check: f for f in audit(_loop(extra, torch.float16)).of(Verdict.FAIL)}
    assert found[check].where.file.endswith("test_values_of_steps.py")
    assert extra.__code__.co_firstlineno < (found[check].where.line or 0) <= extra.__code__.co_firstlineno + 3
    healthy = audit(_loop(extra, torch.float32))
    assert not healthy.failed
    assert set(VALUES) <= {f.check for f in healthy.findings}


@pytest.mark.parametrize("check", ["silent-zero", "headroom"])
def test_a_check_of_values_can_be_selected_for_a_loop(check: str) -> None:
    run = audit(_loop(_rate, torch.float16), checks=[check])
    assert {f.check for f in run.findings} == {check, "coverage"}
    assert run.failed == (check != "headroom")


def test_a_loop_that_raises_in_its_first_step_passes_no_check_of_its_values() -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("no data")

    run: Run = audit(_loop(raises, torch.float16))
    assert not {f.check for f in run.of(Verdict.PASS)} & set(VALUES)


@pytest.mark.parametrize("tests", [torch.isfinite, lambda g: ~g.isnan()], ids=["finite", "not NaN"])
def test_gradients_that_the_next_step_discards_are_no_result(tests: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A loss scale of the code's own begins too high, and comes down where gradients are not finite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(64, 8)
    state = {"scale": 2.0**18}

    def step(number: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = (model(x).float() - 4 * x[:, :1]).square().sum()
        (loss * state["scale"]).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if not all(bool(tests(gradient).all()) for gradient in gradients):
            state["scale"] /= 2
            return loss.item()
        for gradient in gradients:
            gradient.div_(state["scale"])
        optimizer.step()
        return loss.item()

    run = audit({"model": model, "optimizer": optimizer, "step": step})
    assert run.failed == (tests is not torch.isfinite)
