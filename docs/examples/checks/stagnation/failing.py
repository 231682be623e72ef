"""Weights in bfloat16 keep two or three digits: updates of a learning rate of 1e-5 change none of them.

Run: ampcheck audit failing.py:subject
"""

import torch
from torch import nn


def subject():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4).bfloat16(), torch.randn(64, 8).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)

    def step(i):
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step}
