"""LBFGS is stepped through a GradScaler, which takes no closure.

Mechanism: scaler.step(optimizer, closure=...) raises; a closure evaluates the loss several times at one scale.
Source: https://github.com/Lightning-AI/pytorch-lightning/pull/1561
Expected: scaler-protocol.
"""

import pytest
import torch
from torch import nn

ID = "closure_with_scaler"
EXPECTED = {"check": "scaler-protocol"}


def _make(scaled):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    x = torch.randn(16, 4)

    def step(i):
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            scaler.scale(loss).backward()
            return loss

        loss = scaler.step(optimizer, closure=closure)
        scaler.update()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


def buggy():
    return _make(True)


def fixed():
    return _make(False)


def manifests():
    fixed()["step"](0)
    with pytest.raises(RuntimeError, match="losure"):
        buggy()["step"](0)
