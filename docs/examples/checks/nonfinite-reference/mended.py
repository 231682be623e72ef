"""The argument is clamped."""

import torch
from torch import nn


class Log(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).clamp(min=1e-3).log()


def subject():
    torch.manual_seed(0)
    return Log(), (torch.randn(4, 8),)
