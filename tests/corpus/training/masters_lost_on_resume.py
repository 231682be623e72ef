"""A checkpoint holds the bfloat16 weights alone; on resume the float32 weights are made of them.

Mechanism: masters are rebuilt from the rounded weights, so that every restart throws their low bits away.
Source: no single report; written from the mechanism.
Expected: resume.
"""

import torch
from torch import nn

ID = "masters_lost_on_resume"
EXPECTED = {"check": "resume"}


def _make(keep):
    torch.manual_seed(0)
    model = nn.Linear(8, 4).bfloat16()
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=1e-3)
    x = torch.randn(16, 8).bfloat16()

    def step(i):
        model.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        with torch.no_grad():
            for m, p in zip(masters, model.parameters(), strict=True):
                m.grad = p.grad.float()
            optimizer.step()
            for m, p in zip(masters, model.parameters(), strict=True):
                p.copy_(m)
        return loss.item()

    def save():
        kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        return kept | {"masters": [m.detach().clone() for m in masters]} if keep else kept

    def load(kept):
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        with torch.no_grad():
            for m, p in zip(masters, kept.get("masters", model.parameters()), strict=True):
                m.copy_(p)

    return {
        "model": model,
        "optimizer": optimizer,
        "scaler": None,
        "masters": masters,
        "step": step,
        "save": save,
        "load": load,
    }


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    for made, equal in ((buggy(), False), (fixed(), True)):
        made["step"](0)
        made["step"](1)
        before = [m.detach().clone() for m in made["masters"]]
        made["load"](made["save"]())
        assert all(torch.equal(a, m) for a, m in zip(before, made["masters"], strict=True)) is equal
