"""A weight norm squares large weights in float16; its norm is infinite and the weight zero.

Mechanism: v of 300 squares to 90000, g * v / inf is 0 and the layer gives its bias only.
Source: https://github.com/facebookresearch/fairscale/pull/263
Expected: overflow at `layer`, in the power.
"""

import torch
from torch import nn

ID = "weight_norm_overflows"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "layer", "op": "aten::pow.Tensor_Scalar"}


class WeightNormLinear(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide
        self.v, self.g = nn.Parameter(300 * torch.randn(4, 8)), nn.Parameter(torch.ones(4, 1))

    def forward(self, x):
        v = self.v.float() if self.wide else self.v
        return x @ (self.g * v / v.pow(2).sum(1, keepdim=True).sqrt()).to(x.dtype).T


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out = WeightNormLinear(wide), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.layer(x))


def inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 8).half(),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    x = inputs()[0]
    assert (buggy()[0].layer(x) == 0).any()
    assert (fixed()[0].layer(x) != 0).all()
