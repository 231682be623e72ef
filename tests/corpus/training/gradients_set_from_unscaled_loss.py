"""Gradients come from torch.autograd.grad of the plain loss and are then unscaled all the same.

Mechanism: p.grad = grad; scaler.unscale_ divides by the scale.
Source: no single report; written from the mechanism.
Expected: scale-invariance.
"""

import torch
from torch import nn

ID = "gradients_set_from_unscaled_loss"
EXPECTED = {"check": "scale-invariance"}


def _make(scaled):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(16, 8)

    def step(i):
        with torch.autocast("cpu", torch.float16):
            loss = (model(x).float() - 1).square().mean()
        total = scaler.scale(loss)
        for p, g in zip(
            model.parameters(), torch.autograd.grad(total if scaled else loss, list(model.parameters())), strict=True
        ):
            p.grad = g
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
    assert abs(f["model"].weight.grad.norm() / b["model"].weight.grad.norm() - 1024) < 1
