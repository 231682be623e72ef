"""Pixel indices of a wide panorama are computed from relative coordinates in float16.

Mechanism: u * 4095 above 2048 has a spacing of 2, so every second column is never read.
Source: no single report; written from the mechanism.
Expected: integer-cast at `sample`.
"""

import torch
from torch import nn

ID = "pixel_index_in_half"
RUN = "native"
EXPECTED = {"check": "integer-cast", "module": "sample"}


class Sample(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, row, u):
        column = ((u.float() if self.wide else u) * (row.shape[-1] - 1)).round().long()
        return row[:, column.clamp(max=row.shape[-1] - 1)]


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.sample, self.out = Sample(wide), nn.Linear(1024, 4)

    def forward(self, row, u):
        return self.out(self.sample(row, u))


def inputs():
    torch.manual_seed(1)
    return torch.randn(2, 4096).half(), torch.linspace(0.5, 1, 1024).half()


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    assert (broken.sample(*args) != whole.sample(*args)).float().mean() > 0.3
