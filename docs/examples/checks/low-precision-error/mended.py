"""The addend has the dtype of what it is added to."""

import torch
from torch import nn


class Scatter(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, index):
        total = torch.zeros(4, 8)
        return total.index_add_(0, index, self.linear(x).to(total.dtype))


def subject():
    torch.manual_seed(0)
    return Scatter(), (torch.randn(16, 8), torch.arange(16) % 4)
