"""Adam's eps of 1e-8 is zero in float16: where a gradient was zero, the update is 0 / 0.

Mechanism: denom = exp_avg_sq.sqrt() + eps in the dtype of half parameters.
Source: https://github.com/afiaka87/glide-finetune/pull/6
Expected: stagnation.
"""

import torch
from torch import nn

ID = "adam_eps_zero_in_half"
EXPECTED = {"check": "stagnation"}


def _make(eps):
    torch.manual_seed(0)
    model = nn.Embedding(8, 4).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=eps, foreach=False)
    ids = torch.tensor([0, 1, 2])

    def step(i):
        optimizer.zero_grad()
        loss = model(ids).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step}


def buggy():
    return _make(1e-8)


def fixed():
    return _make(1e-4)


def manifests():
    b, f = buggy(), fixed()
    b["step"](0)
    f["step"](0)
    assert b["model"].weight.isnan().any()
    assert f["model"].weight.isfinite().all()
