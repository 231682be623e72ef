"""One factor is scaled down before they are multiplied; the layer after it can learn the rest."""

import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)
        nn.init.normal_(self.up.weight, std=60)
        nn.init.normal_(self.gate.weight, std=60)

    def forward(self, x):
        return self.down((self.up(x) / 256) * self.gate(x))


def subject():
    torch.manual_seed(0)
    return Gated(), (torch.randn(4, 16),)
