"""An L2 penalty is added to the loss that was already scaled, so it weighs 1 / scale of what it should.

Mechanism: (scaler.scale(loss) + penalty).backward().
Source: no single report; written from the mechanism.
Expected: scale-invariance.
"""

import torch
from torch import nn

ID = "penalty_added_after_scaling"
EXPECTED = {"check": "scale-invariance"}


def _make(inside):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.ones(8, 4)).float().square().mean()
        penalty = 0.5 * sum(p.square().sum() for p in model.parameters())
        total = scaler.scale(loss + penalty) if inside else scaler.scale(loss) + penalty
        total.backward()
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
    assert (b["model"].weight.grad - f["model"].weight.grad).norm() > 1e-2
