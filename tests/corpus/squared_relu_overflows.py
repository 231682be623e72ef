"""A squared ReLU overflows float16.

Mechanism: an activation of 300 squares to 90000; the next projection multiplies infinity by weights of both signs.
Source: no single report; written from the mechanism.
Expected: overflow at `mlp.act`.
"""

import torch
from torch import nn

ID = "squared_relu_overflows"
RUN = "autocast:float16"
EXPECTED = {"check": "overflow", "module": "mlp.act"}


class SquaredReLU(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, x):
        return (x.float() if self.wide else x).relu().square()


class MLP(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide
        self.up, self.act, self.down = nn.Linear(8, 32), SquaredReLU(wide), nn.Linear(32, 8)

    def forward(self, x):
        hidden = self.act(self.up(x))
        with torch.autocast("cpu", enabled=not self.wide):
            return self.down(hidden)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.mlp, self.norm = MLP(wide), nn.LayerNorm(8)
        with torch.no_grad():
            self.mlp.up.weight.mul_(150)

    def forward(self, x):
        return self.norm(self.mlp(x))


def inputs():
    torch.manual_seed(1)
    return (2 * torch.randn(4, 8),)


def buggy():
    return Model(), inputs()


def fixed():
    return Model(wide=True), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    with torch.autocast("cpu", torch.float16):
        assert not broken(*args).isfinite().all()
        assert whole(*args).isfinite().all()
