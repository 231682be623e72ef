"""Inverse distance weights overflow float16 at a point that lies on its neighbour.

Mechanism: 1 / (distance + 1e-8) with distance 0 is 1/0, and inf/inf is NaN after the weights are normalised.
Source: https://github.com/open-mmlab/OpenPCDet/issues/324
Expected: silent-zero at `interpolate`, where the guard is added.
"""

import torch
from torch import nn

ID = "inverse_distance_weights"
RUN = "native"
EXPECTED = {"check": "silent-zero", "module": "interpolate", "op": "aten::add.Tensor"}


class Interpolate(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, points, known, features):
        a, b = (points.float(), known.float()) if self.wide else (points, known)
        distance = (a[:, None] - b[None]).abs().sum(-1)
        weight = 1 / (distance + 1e-8)
        return (weight / weight.sum(-1, keepdim=True)).to(features.dtype) @ features


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.interpolate = nn.Linear(4, 6), Interpolate(wide)

    def forward(self, points, known, features):
        return self.interpolate(points, known, self.encode(features))


def inputs():
    torch.manual_seed(1)
    known = torch.randn(5, 3).half()
    return torch.cat((known[:2], known[2:] + 0.5)), known, torch.randn(5, 4).half()


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args).isfinite().all()
    assert fixed()[0](*args).isfinite().all()
