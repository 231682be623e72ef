"""A float32 rotary table promotes query and key, and attention rejects the bfloat16 value beside them.

Mechanism: bfloat16 times a float32 tensor of the same shape is float32; without autocast nothing casts it back.
Source: https://github.com/lucidrains/rotary-embedding-torch/pull/9
Expected: low-precision-error at `attention`, where the three meet.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

ID = "rotary_promotes_query"
RUN = "native"
EXPECTED = {"check": "low-precision-error", "module": "attention"}


class Rotary(nn.Module):
    def __init__(self, dim, cast_back):
        super().__init__()
        self.dim, self.cast_back = dim, cast_back

    def forward(self, x):
        frequencies = 10000.0 ** (-torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        phase = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32), frequencies).repeat(1, 2)
        left, right = x.chunk(2, -1)
        out = x * phase.cos() + torch.cat((-right, left), -1) * phase.sin()
        return out.to(x.dtype) if self.cast_back else out


class Attention(nn.Module):
    def __init__(self, cast_back):
        super().__init__()
        self.qkv, self.rotary = nn.Linear(16, 48, bias=False), Rotary(8, cast_back)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, cast_back=False):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), Attention(cast_back)

    def forward(self, x):
        return x + self.attention(self.norm(x))


def inputs():
    return (torch.randn(2, 6, 16).bfloat16(),)


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(cast_back=True).bfloat16(), inputs()


def manifests():
    args = inputs()
    assert Model()(args[0].float()).isfinite().all()
    assert fixed()[0](*args).dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="same dtype"):
        buggy()[0](*args)
