"""Generator and discriminator have a scaler each, and the generator's gradients are unscaled by the other one's.

Mechanism: the two scales part at the first overflow of one of them.
Source: no single report; written from the mechanism.
Expected: scaler-protocol.
"""

import torch
from torch import nn

ID = "unscaled_by_another_scaler"
EXPECTED = {"check": "scaler-protocol"}


def _make(right):
    torch.manual_seed(0)
    a, b = nn.Linear(4, 1), nn.Linear(4, 1)
    oa, ob = torch.optim.SGD(a.parameters(), lr=0.0), torch.optim.SGD(b.parameters(), lr=0.0)
    sa, sb = (torch.amp.GradScaler("cpu") for _ in "ab")
    for s in (sa, sb):
        s.scale(torch.zeros(()))
    x = torch.ones(2, 4)

    def step(i):
        oa.zero_grad()
        ob.zero_grad()
        la, lb = a(x).mean(), b(x).mean() * (float("inf") if i == 2 else 1.0)
        sa.scale(la).backward()
        (sb if right else sa).scale(lb).backward()
        sa.step(oa)
        sb.step(ob)
        sa.update()
        sb.update()
        return la.item()

    return {"model": nn.ModuleList([a, b]), "optimizer": [oa, ob], "scaler": [sa, sb], "step": step}


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    b, f = buggy(), fixed()
    for i in range(4):
        b["step"](i)
        f["step"](i)
    assert b["model"][1].weight.grad[0, 0] == 2 * f["model"][1].weight.grad[0, 0]
