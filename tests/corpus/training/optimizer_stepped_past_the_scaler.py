"""The loss is scaled but the optimizer steps by itself: the gradients are 1024 times too large.

Mechanism: optimizer.step() was left in place when AMP was added; with Adam only eps no longer counts.
Source: no single report; written from the mechanism.
Expected: scaler-protocol.
"""

import torch
from torch import nn

ID = "optimizer_stepped_past_the_scaler"
EXPECTED = {"check": "scaler-protocol"}


def _make(through):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.ones(8, 4)).float().square().mean()
        scaler.scale(loss).backward()
        if through:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    b, f = buggy(), fixed()
    b["step"](0)
    f["step"](0)
    assert abs(b["model"].weight.grad[0, 0] / f["model"].weight.grad[0, 0] - 1024) < 1
