"""A one-cycle schedule goes on for every batch, also for those whose step the scaler skipped.

Mechanism: scheduler.step() after scaler.update() without a look at whether the optimizer stepped.
Source: https://github.com/NVIDIA-NeMo/Speech/pull/3293
Expected: scheduler-skip.
"""

import torch
from torch import nn

ID = "warm_up_counts_skipped_steps"
EXPECTED = {"check": "scheduler-skip"}


def _make(guard):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=100)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    x = torch.randn(64, 8)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), x[:, :1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if not guard or scaler.get_scale() >= before:
            schedule.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": schedule, "step": step}


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    b, f = buggy(), fixed()
    for i in range(5):
        b["step"](i)
        f["step"](i)
    assert b["scheduler"].last_epoch == 5 > f["scheduler"].last_epoch
