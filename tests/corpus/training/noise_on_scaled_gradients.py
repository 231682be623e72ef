"""Gradient noise is added before the gradients are unscaled: it is 1 / scale of what was asked for.

Mechanism: p.grad += noise between backward and unscale_.
Source: https://github.com/rwth-i6/returnn/pull/1595
Expected: scale-invariance.
"""

import torch
from torch import nn

ID = "noise_on_scaled_gradients"
EXPECTED = {"check": "scale-invariance"}


def _make(unscale):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(i):
        generator = torch.Generator().manual_seed(i)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.ones(8, 4)).float().square().mean()
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        for p in model.parameters():
            p.grad.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
        scaler.step(optimizer)
        scaler.update()
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
    assert (b["model"].weight.grad - f["model"].weight.grad).norm() > 1e-2
