"""Coordinates far from the origin are centred after autocast has rounded them.

Mechanism: the projection gives bfloat16 values near 500 with a spacing of 2; the differences that matter are near 1.
Source: no single report; written from the mechanism.
Expected: precision-loss at `relative`.
"""

import torch
from torch import nn

ID = "centred_after_projection"
RUN = "autocast:bfloat16"
EXPECTED = {"check": "precision-loss", "module": "relative"}


class Relative(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.turn = wide, nn.Linear(3, 3, bias=False)
        nn.init.orthogonal_(self.turn.weight)

    def forward(self, points):
        if self.wide:
            return self.turn(points - points.mean(1, keepdim=True))
        turned = self.turn(points)
        return turned - turned.mean(1, keepdim=True)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.relative, self.out = Relative(wide), nn.Linear(3, 4)

    def forward(self, points):
        return self.out(self.relative(points))


def inputs():
    torch.manual_seed(1)
    return (500 + torch.rand(2, 20, 3),)


def buggy():
    return Model(), inputs()


def fixed():
    return Model(wide=True), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    with torch.autocast("cpu", torch.bfloat16):
        out, wanted = broken(*args).float(), whole(*args).float()
    assert (out - wanted).norm() > 0.3 * wanted.norm()
