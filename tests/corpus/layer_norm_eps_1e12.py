"""A hand-written layer norm with eps=1e-12 divides 0 by 0 for a constant token.

Mechanism: variance 0 plus an eps that is zero in float16.
Source: https://github.com/pytorch/pytorch/issues/41527
Expected: silent-zero at `norm`.
"""

import torch
from torch import nn

ID = "layer_norm_eps_1e12"
RUN = "native"
EXPECTED = {"check": "silent-zero", "module": "norm", "op": "aten::add.Tensor"}


class LayerNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.eps, self.weight, self.bias = eps, nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return self.weight * centred / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt() + self.bias


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.out = LayerNorm(8, 1e-4 if wide else 1e-12), nn.Linear(8, 4)

    def forward(self, x):
        return self.out(self.norm(x))


def inputs():
    torch.manual_seed(1)
    x = torch.randn(2, 3, 8)
    x[1, 2] = 0
    return (x.half(),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args).isfinite().all()
    assert fixed()[0](*args).isfinite().all()
