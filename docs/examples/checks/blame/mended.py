"""Activations are scaled before they are squared."""

import torch
from torch import nn


class SquaredReLU(nn.Module):
    def forward(self, x):
        return (x / 64).relu().square()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 64), SquaredReLU(), nn.Linear(64, 16)
        nn.init.normal_(self.up.weight, std=60)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def subject():
    torch.manual_seed(0)
    return Model(), (torch.randn(4, 16),)
