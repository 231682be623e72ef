"""The weight changes outside of any region."""

import torch
from torch import nn


def subject():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            before = model(x)
        model.weight.data.mul_(2)
        with torch.autocast("cpu", torch.bfloat16):
            after = model(x)
        before.sum() + after.sum()
        (before + after).float().sum().backward()

    return step
