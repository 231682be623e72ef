"""A Python counter is a constant of the graph: each call compiles again.

Run: ampcheck audit failing.py:subject
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x):
        x = self.linear(x)
        self.calls += 1
        return x * self.calls


def subject():
    torch.manual_seed(0)
    return Model(), [(torch.randn(4, 8),), (torch.randn(4, 8),)]
