"""The place is a tensor."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("place", torch.tensor(float(place)))

    def forward(self, x):
        return self.linear(x) * (self.place + 1)


def subject():
    torch.manual_seed(0)
    return [Block(place) for place in range(12)], [(torch.randn(2, 4),)]
