"""Variance as E[x^2] - E[x]^2 cancels in bfloat16 and goes below zero.

Mechanism: an instance norm over channels with a mean of 20 and a deviation of 0.3; both terms are near 400, where the
spacing is 2.
Source: no single report; written from the mechanism.
Expected: overflow at `norm` (the root of a negative variance) in some rows.
"""

import torch
from torch import nn

ID = "variance_by_squares"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "norm"}


class InstanceNorm(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, x):
        y = x.float() if self.wide else x
        mean = y.mean((-2, -1), keepdim=True)
        variance = y.pow(2).mean((-2, -1), keepdim=True) - mean.pow(2)
        return ((y - mean) / (variance + 1e-5).sqrt()).to(x.dtype)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.conv = InstanceNorm(wide), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.conv(self.norm(x))


def inputs():
    torch.manual_seed(1)
    return ((20 + torch.linspace(0, 3, 8)[:, None, None] + 0.3 * torch.randn(2, 8, 8, 8)).bfloat16(),)


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args).isfinite().all()
    assert fixed()[0](*args).isfinite().all()
