"""Centre first, square afterwards."""

import torch
from torch import nn


class Variance(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        nn.init.constant_(self.linear.bias, 20.0)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            y = self.linear(x)
        return (y - y.mean(-1, keepdim=True)).square().mean(-1)


def subject():
    torch.manual_seed(0)
    return Variance(), (torch.randn(32, 64),)
