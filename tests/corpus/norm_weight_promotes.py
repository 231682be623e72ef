"""A float32 norm weight promotes the residual stream to float32, without a numerical symptom.

Mechanism: the norm returns weight * x.to(bfloat16); the weight is float32, so the product is, and so is every
elementwise op and saved activation behind it.
Source: https://github.com/huggingface/transformers/pull/24262
Expected: dtype at `blocks.0.norm`, which the subject declares to be bfloat16.
"""

import torch
from torch import nn

from ampcheck.core.subject import Subject

ID = "norm_weight_promotes"
RUN = "autocast:bfloat16"
EXPECTED = {"check": "dtype", "module": "blocks.0.norm"}


class RMSNorm(nn.Module):
    def __init__(self, dim, cast_back):
        super().__init__()
        self.weight, self.cast_back = nn.Parameter(torch.ones(dim)), cast_back

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        out = self.weight * wide.to(x.dtype)
        return out.to(x.dtype) if self.cast_back else out


class Block(nn.Module):
    def __init__(self, cast_back):
        super().__init__()
        self.norm, self.up, self.down = RMSNorm(16, cast_back), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self, cast_back=False):
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, 16), nn.ModuleList(Block(cast_back) for _ in range(2))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def declared(model):
    return Subject((model, (torch.randn(3, 4),)), dtypes={"blocks.*.norm": torch.bfloat16})


def buggy():
    return declared(Model())


def fixed():
    return declared(Model(cast_back=True))


def manifests():
    x = torch.randn(3, 16).bfloat16()
    assert RMSNorm(16, cast_back=False)(x).dtype is torch.float32
    assert RMSNorm(16, cast_back=True)(x).dtype is torch.bfloat16
