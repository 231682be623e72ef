"""The schedule goes on when the scaler skips the optimizer's step, so that the warm-up is shorter than planned.

Run: ampcheck audit failing.py:subject
"""

import torch
from torch import nn


def subject():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 1), torch.randn(64, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=100)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), x[:, :1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": schedule, "step": step}
