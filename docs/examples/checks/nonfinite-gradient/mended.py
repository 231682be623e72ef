"""The square root is taken in float32, in which the eps is a number."""

import torch
from torch import nn


class Length(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        y = self.linear(x).float()
        return (y.square().sum(-1) + 1e-12).sqrt()


def subject():
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    x[0] = 0
    return Length(), (x,)
