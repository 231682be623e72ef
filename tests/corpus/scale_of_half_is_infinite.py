"""The scale of an 8-bit cast, 448 / amax, is computed in float16, where the amax of small weights makes it infinite.

Mechanism: 448 / amax exceeds 65504 for an amax below 0.0068, and all codes are the largest number or NaN.
Source: https://github.com/meta-pytorch/float8_experimental/pull/61
Expected: overflow at the division, a product with the reciprocal.
"""

import torch
from torch import nn
from torch.nn import functional as F

ID = "scale_of_half_is_infinite"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "", "op": "aten::mul.Tensor"}


class ScaledLinear(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide
        self.weight = nn.Parameter((torch.randn(32, 64) * 1e-3).half())

    def quantised(self):
        amax = self.weight.abs().amax()
        scale = 448 / (amax.float() if self.wide else amax)
        codes = (self.weight.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return (codes.float() / scale).half()

    def forward(self, x):
        return F.linear(x, self.weight + (self.quantised() - self.weight).detach())


def _make(wide):
    torch.manual_seed(0)
    return ScaledLinear(wide), (torch.randn(8, 64).half(),)


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    errors = []
    for wide in (False, True):
        model, _ = _make(wide)
        errors.append(((model.quantised() - model.weight).norm() / model.weight.norm()).item())
    assert not errors[0] < 0.9, errors
    assert errors[1] < 0.05, errors
