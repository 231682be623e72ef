"""A weight changes inside the region, and the second forward still uses the cached cast of the old one.

Run: ampcheck audit failing.py:subject
"""

import torch
from torch import nn


def subject():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            before = model(x)
            with torch.no_grad():
                model.weight.mul_(2)
            after = model(x)
        (before + after).float().sum().backward()

    return step
