"""Promise: of a loop with one mistake one finding stands alone, and the others follow from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ampcheck import audit
from ampcheck.core.run import PROBLEMS


def parts() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(8, 8).half(), torch.randn(4, 8).half()


def eps_of_zero() -> dict[str, Any]:
    """A unit whose gradient is zero is divided by the root of zero, and an eps that float16 does not hold."""
    model, x = parts()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-8)

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x * (number % 2)).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 4}


def half_under_a_scaler() -> dict[str, Any]:
    """GradScaler refuses to unscale gradients of float16 parameters."""
    model, x = parts()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(_: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step, "steps": 4}


@pytest.mark.parametrize(
    ("loop", "cause", "effects"),
    [
        (eps_of_zero, "stagnation", {"overflow", "nonfinite-gradient", "optimizer-state"}),
        (half_under_a_scaler, "scaler-protocol", {"master-weights", "coverage"}),
    ],
)
def test_what_follows_from_a_mistake_stands_beneath_it(loop: Any, cause: str, effects: set[str]) -> None:
    findings = [f for f in audit(loop(), compile=False).findings if f.verdict in PROBLEMS]
    assert {f.check for f in findings if f.cause and f.cause[0] == cause} == effects
