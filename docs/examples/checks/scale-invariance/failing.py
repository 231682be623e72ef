"""A penalty is added after the loss was scaled: its weight depends on the loss scale.

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
        penalty = 0.5 * sum(p.square().sum() for p in model.parameters())
        (scaler.scale(loss) + penalty).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}
