"""A counter as a tensor is an input of the graph."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        x = self.linear(x)
        self.calls.add_(1)
        return x * self.calls


def subject():
    torch.manual_seed(0)
    return Model(), [(torch.randn(4, 8),), (torch.randn(4, 8),)]
