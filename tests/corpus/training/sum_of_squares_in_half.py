"""The loss is a sum over many elements in float16: it is infinite, and every step is skipped.

Mechanism: a sum over 65536 elements of about 1 is above 65504.
Source: no single report; written from the mechanism.
Expected: loss-dtype.
"""

import torch
from torch import nn

ID = "sum_of_squares_in_half"
EXPECTED = {"check": "loss-dtype"}


def _make(wide):
    torch.manual_seed(0)
    model = nn.Linear(16, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = torch.amp.GradScaler("cpu")
    x = 12 * torch.randn(128, 16)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(x)
            out = out.float() if wide else out
            loss = (out * out).sum()
        scaler.scale(loss).backward()
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
    lb = [b["step"](i) for i in range(24)]
    lf = [f["step"](i) for i in range(24)]
    assert all(x == float("inf") for x in lb), (lb[-1], lf)
    assert lf[-1] < lf[0], (lb[-1], lf)
