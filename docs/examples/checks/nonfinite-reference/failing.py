"""The logarithm of a negative number is NaN in every format: no wider one helps.

Run: ampcheck audit failing.py:subject --dtype bfloat16 --fast
"""

import torch
from torch import nn


class Log(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).log()


def subject():
    torch.manual_seed(0)
    return Log(), (torch.randn(4, 8),)
