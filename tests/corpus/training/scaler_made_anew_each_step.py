"""The scaler is created inside the step: it never learns that its scale is too large, and every step is skipped.

Mechanism: a new GradScaler starts at 65536; what update() did is thrown away.
Source: no single report; written from the mechanism.
Expected: loss-scale.
"""

import torch
from torch import nn

ID = "scaler_made_anew_each_step"
EXPECTED = {"check": "loss-scale"}


def _make(once):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    kept = torch.amp.GradScaler("cpu")
    x = 30 * torch.randn(64, 8)

    def step(i):
        scaler = kept if once else torch.amp.GradScaler("cpu")
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    made = {"model": model, "optimizer": optimizer, "step": step}
    return made | {"scaler": kept} if once else made


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    b, f = buggy(), fixed()
    wb, wf = b["model"].weight.clone(), f["model"].weight.clone()
    for i in range(20):
        b["step"](i)
        f["step"](i)
    assert torch.equal(wb, b["model"].weight)
    assert not torch.equal(wf, f["model"].weight)
