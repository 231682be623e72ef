"""The float32 weights are made from the half ones in every step, so that nothing is kept in between.

Mechanism: master = p.float(); master -= lr * grad; p.copy_(master): the update is rounded away each time.
Source: no single report; written from the mechanism.
Expected: stagnation.
"""

import torch
from torch import nn

ID = "masters_made_anew_each_step"
EXPECTED = {"check": "stagnation"}


def _make(keep):
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    nn.init.constant_(model.weight, 0.5)
    model.bfloat16()
    masters = [p.detach().float().clone() for p in model.parameters()]
    x = torch.randn(8, 16).bfloat16()

    def step(i):
        for p in model.parameters():
            p.grad = None
        loss = model(x).float().square().mean()
        loss.backward()
        with torch.no_grad():
            for k, p in enumerate(model.parameters()):
                master = masters[k] if keep else p.detach().float().clone()
                master.sub_(p.grad.float(), alpha=1e-5)
                p.copy_(master)
        return loss.item()

    return {"model": model, "optimizer": None, "scaler": None, "masters": masters if keep else None, "step": step}


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    b, f = buggy(), fixed()
    wb, wf = b["model"].weight.clone(), f["model"].weight.clone()
    for i in range(1000):
        b["step"](i)
        f["step"](i)
    assert torch.equal(wb, b["model"].weight)
    assert not torch.equal(wf, f["model"].weight)
