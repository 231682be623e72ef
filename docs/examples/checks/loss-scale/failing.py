"""A scaler that is created in each step never learns: its first scale overflows, and each step is skipped.

Run: ampcheck audit failing.py:subject
"""

import torch
from torch import nn


def subject():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 1), 30 * torch.randn(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)

    def step(i):
        scaler = torch.amp.GradScaler("cpu")
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step}
