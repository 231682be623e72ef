"""Adam keeps the squares of gradients in float16, where those of small gradients become zero: what is divided by their
root is too large.

Run: ampcheck audit failing.py:subject
"""

import torch
from torch import nn


def subject():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4).half(), torch.randn(64, 8).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)

    def step(i):
        optimizer.zero_grad()
        loss = model(x).float().square().mean() * 1e-3
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step}
