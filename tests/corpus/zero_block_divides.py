"""The scale of a block that is zero throughout, amax / 448, is zero, and divides the block.

Mechanism: 0 / 0 is NaN, in float64 as well, and the clamp leaves it.
Source: https://github.com/THUDM/slime/pull/2256 and https://github.com/pytorch/ao/pull/4762
Expected: nonfinite-reference at the division.
"""

import torch
from torch import nn
from torch.nn import functional as F

ID = "zero_block_divides"
RUN = "autocast:bfloat16"
EXPECTED = {"check": "nonfinite-reference", "module": "", "op": "aten::div.Tensor"}


class BlockLinear(nn.Module):
    def __init__(self, least):
        super().__init__()
        self.least = least
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        with torch.no_grad():
            self.weight[32:] = 0  # rows of a vocabulary that was padded

    def quantised(self):
        blocks = self.weight.float().view(4, 16, 4, 16)
        scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=self.least) / 448
        codes = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return (codes.float() * scale).view_as(self.weight)

    def forward(self, x):
        return F.linear(x, self.weight + (self.quantised() - self.weight).detach())


def _make(least):
    torch.manual_seed(0)
    return BlockLinear(least), (torch.randn(8, 64),)


def buggy():
    return _make(0.0)


def fixed():
    return _make(1e-12)


def manifests():
    assert _make(0.0)[0].quantised().isnan().any()
    assert _make(1e-12)[0].quantised().isfinite().all()
