"""The smoothed loss that is shown is a bfloat16 average and stays at its first value.

Mechanism: shown = 0.999 * shown + 0.001 * loss rounds back to shown.
Source: no single report; written from the mechanism.
Expected: stagnation.
"""

import torch
from torch import nn

ID = "smoothed_loss_in_bfloat16"
EXPECTED = {"check": "stagnation"}


def _make(dtype):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(64, 8)
    shown = None

    def step(i):
        nonlocal shown
        optimizer.zero_grad()
        loss = (model(x) - 3).square().mean()
        loss.backward()
        optimizer.step()
        now = loss.detach().to(dtype)
        shown = now if shown is None else 0.999 * shown + 0.001 * now
        return shown.item()

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step}


def buggy():
    return _make(torch.bfloat16)


def fixed():
    return _make(torch.float32)


def manifests():
    b, f = buggy(), fixed()
    first = b["step"](0), f["step"](0)
    for i in range(1, 400):
        x, y = b["step"](i), f["step"](i)
    assert x == first[0]
    assert y < 0.8 * first[1]
