"""A branch on a value of a tensor ends the graph.

Run: ampcheck audit failing.py:subject
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = self.linear(x)
        if x.sum() > 0:
            x = x * 2
        return x + 1


def subject():
    torch.manual_seed(0)
    return Model(), [(torch.randn(4, 8),), (torch.randn(4, 8),)]
