"""The variance as the mean of squares less the square of the mean: the digits that the difference needs were rounded
away.

Run: ampcheck audit failing.py:subject --dtype bfloat16 --fast
"""

import torch
from torch import nn


class Variance(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        nn.init.constant_(self.linear.bias, 20.0)

    def forward(self, x):
        y = self.linear(x)
        return y.square().mean(-1) - y.mean(-1).square()


def subject():
    torch.manual_seed(0)
    return Variance(), (torch.randn(32, 64),)
