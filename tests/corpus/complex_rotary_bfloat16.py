"""A rotary embedding by complex multiplication takes no bfloat16.

Mechanism: view_as_complex knows half, float and double only.
Source: https://github.com/pytorch/pytorch/issues/95100
Expected: low-precision-error at `attention.rotary`.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

ID = "complex_rotary_bfloat16"
RUN = "native"
EXPECTED = {"check": "low-precision-error", "module": "attention.rotary"}


class Rotary(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, x):
        pairs = torch.view_as_complex((x.float() if self.wide else x).unflatten(-1, (-1, 2)).contiguous())
        angle = torch.outer(torch.arange(x.shape[-2]).float(), torch.tensor([1.0, 0.1, 0.01, 0.001]))
        turned = pairs * torch.polar(torch.ones_like(angle), angle).to(pairs.dtype)
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.qkv, self.rotary = nn.Linear(8, 24), Rotary(wide)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.attention = Attention(wide)

    def forward(self, x):
        return self.attention(x)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 5, 8).bfloat16(),)


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    assert whole(*args).isfinite().all()
    with pytest.raises(RuntimeError, match="view_as_complex"):
        broken(*args)
