"""The scales of blocks, amax / 448, are kept in float8_e4m3fn, in which those of small values are zero, and divide.

Mechanism: a zero of such a block becomes NaN by 0 / 0; its other values become 448 at the clamp, and 0 times 448 is 0.
Source: https://github.com/NVIDIA/Model-Optimizer/pull/2243 and https://github.com/kekzl/imp/issues/1544
Expected: overflow where the scale becomes zero, or at the division.
"""

import torch
from torch import nn
from torch.nn import functional as F

ID = "flushed_scale_divides"
RUN = "autocast:bfloat16"
EXPECTED = {"check": ("overflow", "silent-zero"), "module": ""}


class Gated(nn.Module):
    def __init__(self, two_levels):
        super().__init__()
        self.two_levels = two_levels
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 32)

    def quantised(self, h):
        blocks = h.float().unflatten(-1, (4, 16))
        scale = blocks.abs().amax(-1, keepdim=True) / 448
        whole = scale.amax() / 448 if self.two_levels else 1.0
        scale = (scale / whole).to(torch.float8_e4m3fn).float() * whole
        return ((blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2)

    def forward(self, x):
        h = F.relu(self.up(x))  # zeros in every block
        return self.down(h + (self.quantised(h) - h).detach())


def _make(two_levels):
    torch.manual_seed(0)
    return Gated(two_levels), (torch.randn(8, 64) * 0.25,)


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    for two_levels in (False, True):
        model, (x,) = _make(two_levels)
        assert bool(model.quantised(F.relu(model.up(x))).isnan().any()) is not two_levels
