"""Gradients are clipped while they are still multiplied by the loss scale.

Run: ampcheck audit failing.py:subject
"""

import torch
from torch import nn


def subject():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 1), torch.randn(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}
