"""Weights in float32, and autocast in forward."""

import torch
from torch import nn


def subject():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4), torch.randn(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step}
