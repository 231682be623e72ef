"""Nearest neighbours are found with a product that autocast runs in bfloat16.

Mechanism: points lie 50 from the origin and 0.3 apart; a^2 - 2ab + b^2 near 7500 has a spacing of 32 in the
product, far above the squared distances, so the neighbours are arbitrary.
Source: no single report; written from the mechanism.
Expected: precision-loss at `group`.
"""

import torch
from torch import nn

ID = "neighbours_under_autocast"
RUN = "autocast:bfloat16"
EXPECTED = {"check": "precision-loss", "module": "group"}


class Group(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, points):
        with torch.autocast("cpu", enabled=not self.wide):
            square = points.square().sum(-1)
            distance = square[:, None] - 2 * (points @ points.T).float() + square[None]
        near = distance.topk(4, largest=False).indices
        return (points[near] - points[:, None]).amax(1)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.group, self.out = Group(wide), nn.Linear(3, 4)

    def forward(self, points):
        return self.out(self.group(points))


def inputs():
    torch.manual_seed(1)
    return (50 + torch.rand(64, 3),)


def buggy():
    return Model(), inputs()


def fixed():
    return Model(wide=True), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    with torch.autocast("cpu", torch.bfloat16):
        out, wanted = broken.group(*args), whole.group(*args)
    assert (out - wanted).norm() > 0.5 * wanted.norm()
