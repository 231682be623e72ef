"""A scale of 1 is kept for ever: the gradients of a mean over many elements are below float16.

Mechanism: GradScaler(init_scale=1, growth_interval=10**9) scales nothing.
Source: no single report; written from the mechanism.
Expected: gradient-underflow.
"""

import torch
from torch import nn

ID = "scale_too_small_for_the_loss"
EXPECTED = {"check": "gradient-underflow"}


def _make(scale):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**9)
    x = torch.randn(256, 8)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = 1e-6 * nn.functional.mse_loss(model(x).float(), x[:, :1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


def buggy():
    return _make(1.0)


def fixed():
    return _make(65536.0)


def manifests():
    b, f = buggy(), fixed()
    b["step"](0)
    f["step"](0)

    def zeros(c):
        return (c["model"][0].weight.grad == 0).float().mean().item()

    assert zeros(b) > 0.5, (zeros(b), zeros(f))
    assert zeros(f) < 0.1, (zeros(b), zeros(f))
