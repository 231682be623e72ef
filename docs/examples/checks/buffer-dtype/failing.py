"""The average of the weights is a bfloat16 copy, although the policy of this loop is amp.

Run: ampcheck audit failing.py:subject
"""

import copy

import torch
from torch import nn


def subject():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4), torch.randn(64, 8)
    ema = copy.deepcopy(model).bfloat16().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for average, weight in zip(ema.parameters(), model.parameters(), strict=True):
                average.lerp_(weight.to(average.dtype), 0.5)
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "ema": ema, "policy": "amp"}
