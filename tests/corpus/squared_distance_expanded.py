"""A codebook distance written as a^2 - 2ab + b^2 goes below zero under bfloat16 autocast, and its root is NaN.

Mechanism: the product runs in bfloat16 and the squares in float32; for a vector close to its code the difference
is smaller than the rounding of the product.
Source: https://github.com/lucidrains/vector-quantize-pytorch/pull/144
Expected: overflow at `quantize`, in the root.
"""

import torch
from torch import nn

ID = "squared_distance_expanded"
RUN = "autocast:bfloat16"
EXPECTED = {"check": "overflow", "module": "quantize", "op": "aten::sqrt"}


class Quantize(nn.Module):
    def __init__(self, codes, dim, wide):
        super().__init__()
        self.wide, self.codes = wide, nn.Parameter(3 + torch.randn(codes, dim))

    def forward(self, x):
        if self.wide:
            return torch.cdist(x.float(), self.codes.float(), compute_mode="donot_use_mm_for_euclid_dist")
        squares = x.square().sum(-1, keepdim=True) + self.codes.square().sum(-1)
        return (squares - 2 * x @ self.codes.T).sqrt()


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.quantize = Quantize(8, 16, wide)

    def forward(self, x):
        return self.quantize(x)


def inputs():
    torch.manual_seed(0)
    codes = 3 + torch.randn(8, 16)
    return (codes + 0.02 * torch.randn(8, 16),)


def buggy():
    return Model(), inputs()


def fixed():
    return Model(wide=True), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    assert broken(*args).isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert not broken(*args).isfinite().all()
        assert whole(*args).isfinite().all()
