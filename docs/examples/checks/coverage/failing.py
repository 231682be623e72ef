"""Nothing in this model is an op that autocast casts: it ran in float32, and no verdict on 16 bits is possible.

Run: ampcheck audit failing.py:subject --dtype bfloat16 --fast
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.weight


def subject():
    torch.manual_seed(0)
    return Model(), (torch.randn(4, 8),)
