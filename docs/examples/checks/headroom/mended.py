"""A tenth of the size leaves room."""

import torch
from torch import nn


class Wide(nn.Module):
    def __init__(self, std):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        nn.init.normal_(self.up.weight, std=std)
        nn.init.normal_(self.down.weight, std=1e-3)

    def forward(self, x):
        return self.down(self.up(x))


def subject():
    torch.manual_seed(0)
    return Wide(std=300.0), (torch.randn(4, 16),)
