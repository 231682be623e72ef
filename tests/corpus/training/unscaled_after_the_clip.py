"""Gradients are clipped while they still are 65536 times too large: every step has the norm max_norm / 65536.

Mechanism: clip_grad_norm_ runs before scaler.unscale_ (inside scaler.step), so that unscaling shrinks what was clipped.
Source: https://github.com/milesial/Pytorch-UNet/pull/470
Expected: scaler-protocol at clip_grad_norm_.
"""

import torch
from torch import nn

ID = "unscaled_after_the_clip"
EXPECTED = {"check": "scaler-protocol"}


def _make(unscale):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(32, 8)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), x.sum(1, keepdim=True))
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
    lb = [b["step"](i) for i in range(20)]
    lf = [f["step"](i) for i in range(20)]
    assert lf[-1] < 0.7 * lf[0], (lb, lf)
    assert lb[-1] > 0.95 * lb[0], (lb, lf)
