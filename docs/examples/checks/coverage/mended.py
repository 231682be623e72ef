"""A matrix product runs in bfloat16."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x):
        return x @ self.weight


def subject():
    torch.manual_seed(0)
    return Model(), (torch.randn(4, 8),)
