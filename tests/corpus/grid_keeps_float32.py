"""A sampling grid stays float32 beside a bfloat16 feature map.

Mechanism: the grid is made with linspace in the default dtype, and grid_sample takes one dtype only.
Source: no single report; written from the mechanism.
Expected: low-precision-error at `warp`.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

ID = "grid_keeps_float32"
RUN = "native"
EXPECTED = {"check": "low-precision-error", "module": "warp"}


class Warp(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, x):
        line = torch.linspace(-1, 1, x.shape[-1])
        grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)[None]
        return F.grid_sample(x, grid.to(x.dtype) if self.wide else grid, align_corners=True)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.warp = nn.Conv2d(2, 2, 1), Warp(wide)

    def forward(self, x):
        return self.warp(self.conv(x))


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 2, 5, 5).bfloat16(),)


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    assert whole(*args).isfinite().all()
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        broken(*args)
