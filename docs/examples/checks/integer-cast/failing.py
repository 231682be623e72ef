"""Positions in bfloat16 are equal in pairs from 256 on, and so are their sines.

Run: ampcheck audit failing.py:subject --dtype bfloat16 --fast
"""

import torch
from torch import nn


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        y = self.linear(x)
        position = torch.arange(x.shape[0]).to(y.dtype)
        return y + (position[:, None] * 0.01).sin()


def subject():
    torch.manual_seed(0)
    return Positions(), (torch.randn(512, 16),)
