"""The square inside a hand-written RMS norm vanishes in float16 for a quiet input.

Mechanism: values near 1e-4 square to 1e-8, which is zero; the norm divides by sqrt(eps) instead of the size.
Source: https://github.com/skyzh/tiny-llm/pull/18
Expected: silent-zero at `norm`, in the power.
"""

import torch
from torch import nn

ID = "rms_square_vanishes"
RUN = "native"
EXPECTED = {"check": "silent-zero", "module": "norm", "op": "aten::pow.Tensor_Scalar"}


class RMSNorm(nn.Module):
    def __init__(self, dim, wide):
        super().__init__()
        self.weight, self.wide = nn.Parameter(torch.ones(dim)), wide

    def forward(self, x):
        y = x.float() if self.wide else x
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-7)).to(x.dtype)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = RMSNorm(16, wide), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.norm(x))


def inputs():
    return ((torch.linspace(-1.5, 1.5, 48).view(3, 16) * 1e-4).half(),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    x = inputs()[0]
    broken, whole = buggy()[0].norm(x).float(), fixed()[0].norm(x).float()
    assert (broken - whole).norm() > 0.03 * whole.norm()
