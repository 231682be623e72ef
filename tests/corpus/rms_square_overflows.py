"""The square inside a hand-written RMS norm overflows float16.

Mechanism: a single channel of 300 squares to 90000; its rsqrt is 0 and the token vanishes.
Source: https://github.com/pytorch/pytorch/pull/133085
Expected: overflow at `norm`, in the power.
"""

import torch
from torch import nn

ID = "rms_square_overflows"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "norm", "op": "aten::pow.Tensor_Scalar"}


class RMSNorm(nn.Module):
    def __init__(self, dim, wide):
        super().__init__()
        self.weight, self.wide = nn.Parameter(torch.ones(dim)), wide

    def forward(self, x):
        y = x.float() if self.wide else x
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = RMSNorm(16, wide), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.norm(x))


def inputs():
    x = torch.linspace(-2, 2, 48).view(3, 16)
    x[0, 3] = 300
    return (x.half(),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    x = inputs()[0]
    assert (buggy()[0].norm(x)[0] == 0).all()
    assert (fixed()[0].norm(x)[0] != 0).any()
