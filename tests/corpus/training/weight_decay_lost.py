"""Decoupled weight decay of bfloat16 weights does nothing: w * (1 - lr * wd) rounds back to w.

Mechanism: lr 1e-2 and decay 0.1 shrink by 1e-3; bfloat16 needs 4e-3. The gradient's own updates do arrive.
Source: https://github.com/Nerogar/OneTrainer/issues/996
Expected: stagnation.
"""

import torch
from torch import nn

ID = "weight_decay_lost"
EXPECTED = {"check": "stagnation"}


def _make(dtype):
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    x = torch.randn(8, 16).to(dtype)

    def step(i):
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step}


def buggy():
    return _make(torch.bfloat16)


def fixed():
    return _make(torch.float32)


def manifests():
    w = torch.randn(1000)
    assert (
        torch.equal(w.bfloat16() * (1 - 1e-3), w.bfloat16())
        or ((w.bfloat16() * (1 - 1e-3)) == w.bfloat16()).float().mean() > 0.95
    )
