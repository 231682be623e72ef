"""The scale of an MX block, amax / 448, is rounded to the nearest power of two: for many blocks below amax / 448.

Mechanism: such a block saturates in float8_e4m3fn, so that its outlier is lost in part.
Source: https://github.com/ROCm/FlyDSL/pull/590 and https://github.com/pytorch/ao/issues/2035
Expected: overflow or precision-loss at the cast to float8_e4m3fn.
"""

import torch
from torch import nn

ID = "mx_scale_rounds_down"
RUN = "autocast:bfloat16"
EXPECTED = {"check": ("overflow", "precision-loss"), "module": ""}


class Mx(nn.Module):
    def __init__(self, up):
        super().__init__()
        self.up, self.proj = up, nn.Linear(64, 8)

    def quantised(self, x):
        blocks = x.float().unflatten(-1, (2, 32))
        ratio = blocks.abs().amax(-1, keepdim=True) / 448
        scale = torch.exp2(ratio.log2().ceil()) if self.up else ratio.to(torch.float8_e8m0fnu).float()
        codes = (blocks / scale).to(torch.float8_e4m3fn)
        return (codes.float() * scale).flatten(-2)

    def forward(self, x):
        return self.proj(x + (self.quantised(x) - x).detach())


def _make(up):
    torch.manual_seed(0)
    x = torch.randn(16, 64)
    x[:, ::32] = 5.0 + torch.rand(16, 2)  # outliers decide the scale
    return Mx(up), (x,)


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    errors = []
    for up in (False, True):
        model, (x,) = _make(up)
        errors.append(((model.quantised(x) - x) / x)[:, ::32].abs().max().item())
    assert errors[0] > 0.15, errors
    assert errors[1] < 0.07, errors
