"""Stochastic weight averaging of a bfloat16 model: late models hardly change the mean.

Mechanism: avg + (p - avg) / (n + 1) with n of 500 in bfloat16.
Source: no single report; written from the mechanism.
Expected: stagnation.
"""

import torch
from torch import nn

ID = "swa_average_in_bfloat16"
EXPECTED = {"check": "stagnation"}


def _make(dtype):
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.module.to(dtype)
    average.n_averaged.fill_(5000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(32, 16)

    def step(i):
        loss = nn.functional.cross_entropy(model(x), torch.arange(32) % 4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step, "swa": average}


def buggy():
    return _make(torch.bfloat16)


def fixed():
    return _make(torch.float32)


def manifests():
    b, f = buggy(), fixed()
    w, v = b["swa"].module.weight.clone(), f["swa"].module.weight.clone()
    for i in range(5):
        b["step"](i)
        f["step"](i)
    assert (b["swa"].module.weight == w).float().mean() > 0.8
    assert (f["swa"].module.weight != v).float().mean() > 0.9
