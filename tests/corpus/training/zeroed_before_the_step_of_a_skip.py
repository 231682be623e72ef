"""An epoch schedule with accumulation: gradients of a skipped step stay and mix with those of the next scale.

Mechanism: optimizer.zero_grad() is called only where the scale did not fall.
Source: no single report; written from the mechanism.
Expected: scaler-protocol.
"""

import torch
from torch import nn

ID = "zeroed_before_the_step_of_a_skip"
EXPECTED = {"check": "scaler-protocol"}


def _make(always):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    x = torch.randn(64, 4)

    def step(i):
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if always or scaler.get_scale() >= before:
            optimizer.zero_grad()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    b, f = buggy(), fixed()
    for i in range(20):
        b["step"](i)
        f["step"](i)
    assert b["scaler"].get_scale() < 0.1 * f["scaler"].get_scale()
