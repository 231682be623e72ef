"""Each block knows its place as a Python integer: beyond eight versions of one function Dynamo gives up, and the rest
runs in eager mode.

Run: ampcheck audit failing.py:subject
"""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.linear, self.place = nn.Linear(4, 4), place

    def forward(self, x):
        return self.linear(x) * (self.place + 1)


def subject():
    torch.manual_seed(0)
    return [Block(place) for place in range(12)], [(torch.randn(2, 4),)]
