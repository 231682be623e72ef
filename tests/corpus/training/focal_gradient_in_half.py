"""A focal loss over many anchors under float16 autocast, without a scaler: easy anchors give gradients of zero.

Mechanism: (1 - p)**2 times a mean over 100000 anchors.
Source: no single report; written from the mechanism.
Expected: gradient-underflow.
"""

import torch
from torch import nn

ID = "focal_gradient_in_half"
EXPECTED = {"check": "gradient-underflow"}


def _make(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 64))
    nn.init.constant_(model[2].bias, -4.6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(512, 8)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            out = model(x)
        p = out.float().sigmoid()
        loss = (p**2 * -(1 - p).log()).mean()
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

    assert zeros(b) > 0.9 > 0.1 > zeros(f), (zeros(b), zeros(f))
