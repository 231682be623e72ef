"""A squeeze gate deep in a stack uses E[x^2] - E[x]^2 in bfloat16; its result feeds a residual stream of larger values.

Mechanism: the variance of channels with mean 8 and deviation 0.2 is off by a factor, or negative and clamped.
Source: no single report; written from the mechanism.
Expected: precision-loss at `blocks.1.gate`.
"""

import torch
from torch import nn

ID = "variance_hidden_in_stack"
RUN = "native"
EXPECTED = {"check": "precision-loss", "module": "blocks.1.gate"}


class Gate(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, x):
        y = (x.float() if self.wide else x) * 0.3 + 8
        variance = (y.square().mean(1, keepdim=True) - y.mean(1, keepdim=True).square()).clamp(min=0)
        return (variance * 10).to(x.dtype).sigmoid()


class Block(nn.Module):
    def __init__(self, dim, wide):
        super().__init__()
        self.norm, self.gate, self.mix = nn.LayerNorm(dim), Gate(wide), nn.Linear(dim, dim)

    def forward(self, x):
        hidden = self.norm(x)
        return x + self.mix(hidden) * self.gate(hidden)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList((Block(16, True), Block(16, wide), Block(16, True)))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 64, 16).bfloat16(),)


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    x = inputs()[0]
    out, wanted = buggy()[0].blocks[1].gate(x).float(), fixed()[0].blocks[1].gate(x).float()
    assert (out - wanted).norm() > 0.1 * wanted.norm()
