"""Discriminator and generator are trained inside one autocast region: the generator meets the old discriminator.

Mechanism: autocast keeps the 16-bit copies of weights until the outermost region ends.
Source: https://github.com/pytorch/pytorch/issues/120376
Expected: autocast-scope.
"""

import torch
from torch import nn

ID = "weights_change_inside_autocast"
EXPECTED = {"check": "autocast-scope"}


def _make(apart):
    torch.manual_seed(0)
    g, d = nn.Linear(4, 4), nn.Linear(4, 1)
    og, od = torch.optim.SGD(g.parameters(), lr=0.1), torch.optim.SGD(d.parameters(), lr=1.0)
    x = torch.randn(16, 4)
    seen = {}

    def critic():
        loss = d(x).float().mean() - d(g(x).detach()).float().mean()
        od.zero_grad()
        loss.backward()
        od.step()
        return loss

    def generator():
        out = d(g(x))
        seen["now"] = out.detach().float().mean().item()
        loss = -out.float().mean()
        og.zero_grad()
        loss.backward()
        og.step()
        return loss

    def step(i):
        if apart:
            with torch.autocast("cpu", torch.bfloat16):
                loss = d(x).float().mean() - d(g(x).detach()).float().mean()
            od.zero_grad()
            loss.backward()
            od.step()
            with torch.autocast("cpu", torch.bfloat16):
                out = d(g(x))
                back = -out.float().mean()
            seen["now"] = out.detach().float().mean().item()
            og.zero_grad()
            back.backward()
            og.step()
        else:
            with torch.autocast("cpu", torch.bfloat16):
                loss = critic()
                generator()
        return loss.item()

    return {"model": nn.ModuleList([g, d]), "optimizer": [og, od], "scaler": None, "step": step, "seen": seen}


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    b, f = buggy(), fixed()
    b["step"](0)
    f["step"](0)
    assert abs(b["seen"]["now"] - f["seen"]["now"]) > 0.05, (b["seen"], f["seen"])
