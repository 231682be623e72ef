"""A step is left out because its norm is too large, and scaler.update() with it: the next unscale_ is refused.

Mechanism: unscale_ marks the optimizer as unscaled until update() is called.
Source: https://github.com/Haian-Jin/LVSM/pull/19
Expected: scaler-protocol.
"""

import pytest
import torch
from torch import nn

ID = "update_left_out_on_large_norm"
EXPECTED = {"check": "scaler-protocol"}


def _make(always):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.ones(8, 4)).float().mean() * (100.0 if i == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        if norm < 20.0:
            scaler.step(optimizer)
            scaler.update()
        elif always:
            scaler.update()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    b, f = buggy(), fixed()
    for i in range(4):
        b["step"](i)
    with pytest.raises(RuntimeError, match="unscale_"):
        b["step"](4)
    for i in range(6):
        f["step"](i)
