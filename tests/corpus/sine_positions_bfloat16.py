"""Sinusoidal positions are built with arange in bfloat16.

Mechanism: beyond 256 neighbouring positions are one number, so long sequences lose their order.
Source: https://github.com/valeoai/VideoActionModel/issues/35
Expected: integer-cast at `positions`, in arange.
"""

import torch
from torch import nn

ID = "sine_positions_bfloat16"
RUN = "native"
EXPECTED = {"check": "integer-cast", "module": "positions", "op": "aten::arange"}


class Positions(nn.Module):
    def __init__(self, dim, wide):
        super().__init__()
        self.dim, self.wide = dim, wide

    def forward(self, x):
        dtype = torch.float32 if self.wide else x.dtype
        position = torch.arange(x.shape[1], dtype=dtype)
        frequency = 10000.0 ** (-torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        phase = position[:, None].float() * frequency
        return x + torch.cat((phase.sin(), phase.cos()), -1).to(x.dtype)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.positions, self.out = Positions(8, wide), nn.Linear(8, 8)

    def forward(self, x):
        return self.out(self.positions(x))


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 600, 8).bfloat16(),)


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    x = torch.zeros(1, 600, 8)
    exact = Positions(8, True)(x)
    assert (buggy()[0].positions(x.bfloat16()) - exact).abs().max() > 0.5
    assert (fixed()[0].positions(x.bfloat16()) - exact).abs().max() < 0.01
