"""Gradients are cast to float16 for communication, without a scale: the small ones are gone.

Mechanism: a hook returns grad.half().float(); below 3e-8 that is zero.
Source: https://github.com/horovod/horovod/issues/278
Expected: gradient-underflow.
"""

import torch
from torch import nn

ID = "gradients_compressed_to_half"
EXPECTED = {"check": "gradient-underflow"}


def _make(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.register_hook(lambda g: g.to(dtype).float())
    x = torch.randn(64, 16)

    def step(i):
        optimizer.zero_grad()
        loss = 1e-6 * model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step}


def buggy():
    return _make(torch.float16)


def fixed():
    return _make(torch.bfloat16)


def manifests():
    b, f = buggy(), fixed()
    b["step"](0)
    f["step"](0)

    def zeros(c):
        return (c["model"][0].weight.grad == 0).float().mean().item()

    assert zeros(b) > 0.3, (zeros(b), zeros(f))
    assert zeros(f) < 0.05, (zeros(b), zeros(f))
