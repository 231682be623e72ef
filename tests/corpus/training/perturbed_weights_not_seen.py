"""Sharpness-aware training inside one autocast region: the second pass does not see the perturbed weights.

Mechanism: the cached 16-bit weights of the first pass are used again.
Source: no single report; written from the mechanism.
Expected: autocast-scope.
"""

import torch
from torch import nn

ID = "perturbed_weights_not_seen"
EXPECTED = {"check": "autocast-scope"}


def _make(apart):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(16, 8), torch.arange(16) % 4
    seen = []

    def both():
        with (
            torch.autocast("cpu", torch.bfloat16)
            if apart
            else torch.autocast("cpu", torch.bfloat16, enabled=torch.is_autocast_enabled("cpu"))
        ):
            return nn.functional.cross_entropy(model(x).float(), y)

    def inner():
        optimizer.zero_grad()
        first = both()
        first.backward()
        with torch.no_grad():
            moves = [0.5 * p.grad / p.grad.norm() for p in model.parameters()]
            for p, e in zip(model.parameters(), moves, strict=True):
                p.add_(e)
        optimizer.zero_grad()
        second = both()
        second.backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), moves, strict=True):
                p.sub_(e)
        optimizer.step()
        seen[:] = [first.item(), second.item()]
        return first.item()

    def step(i):
        if apart:
            return inner()
        with torch.autocast("cpu", torch.bfloat16):
            return inner()

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step, "seen": seen}


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    b, f = buggy(), fixed()
    b["step"](0)
    f["step"](0)
    assert b["seen"][0] == b["seen"][1]
    assert f["seen"][1] > f["seen"][0] + 0.05
