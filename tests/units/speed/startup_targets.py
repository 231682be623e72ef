"""Subjects that a fresh process loads: as small as may be, most without a kernel of Inductor's, which costs seconds."""

import torch
from torch import nn


def products():
    x = torch.ones(64, 64)

    def products(x):
        return (x @ x) @ x

    return products, [(x,)]


def chained():
    return (lambda x: x.sin().exp() + 1), [(torch.ones(64, 64),)]


def compiled_already():
    return torch.compile(nn.Linear(4, 4)), (torch.ones(2, 4),)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def stack():
    return Stack().eval(), [(torch.ones(n, 8),) for n in (2, 3)]
