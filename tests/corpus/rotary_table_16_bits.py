"""A rotary table computed in bfloat16 is wrong at large positions.

Mechanism: model.bfloat16() casts the inv_freq buffer, and the positions follow its dtype; position * frequency near
1000 has a spacing of 4, more than half a period of the cosine.
Source: https://github.com/huggingface/transformers/issues/25681
Expected: precision-loss at `attention.rotary`.
"""

import torch
import torch.nn.functional as F
from torch import nn

ID = "rotary_table_16_bits"
RUN = "native"
EXPECTED = {"check": "precision-loss", "module": "attention.rotary"}


class Rotary(nn.Module):
    def __init__(self, dim, wide):
        super().__init__()
        self.dim, self.wide = dim, wide
        self.register_buffer("inv_freq", self.frequencies(), persistent=False)

    def frequencies(self):
        return 10000.0 ** (-torch.arange(0, self.dim, 2).float() / self.dim)

    def forward(self, length, dtype):
        frequencies = self.frequencies() if self.wide else self.inv_freq
        positions = torch.arange(length, dtype=frequencies.dtype)
        phase = torch.outer(positions, frequencies).repeat(1, 2)
        return phase.cos().to(dtype), phase.sin().to(dtype)


def turned(x, cos, sin):
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Attention(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.qkv, self.rotary = nn.Linear(16, 48, bias=False), Rotary(16, wide)

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        cos, sin = self.rotary(x.shape[1], x.dtype)
        return F.scaled_dot_product_attention(turned(q, cos, sin), turned(k, cos, sin), v)[:, 0]


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.attention = nn.LayerNorm(16), Attention(wide)
        nn.init.normal_(self.attention.qkv.weight, std=0.8)

    def forward(self, x):
        return self.attention(self.norm(x))


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 1024, 16).bfloat16(),)


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    broken, whole = buggy()[0].attention.rotary, fixed()[0].attention.rotary
    exact = Rotary(16, False)(1024, torch.float32)[0]
    assert (broken(1024, torch.float32)[0] - exact).abs().max() > 1
    assert (whole(1024, torch.float32)[0] - exact).abs().max() < 0.01
