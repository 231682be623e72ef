"""Attention scores without 1/sqrt(d) overflow float16.

Mechanism: queries and keys with large norms (no QK norm, no scale) give scores above 65504.
Source: https://github.com/plemeri/InSPyReNet/issues/36
Expected: overflow at `attention`, in the score product.
"""

import torch
from torch import nn

ID = "attention_without_scaling"
RUN = "autocast:float16"
EXPECTED = {"check": "overflow", "module": "attention", "op": "aten::bmm"}


class Attention(nn.Module):
    def __init__(self, dim, wide):
        super().__init__()
        self.wide = wide
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        with torch.no_grad():
            self.query.weight.copy_(60 * torch.eye(dim))
            self.key.weight.copy_(60 * torch.eye(dim))

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.wide:
            with torch.autocast("cpu", enabled=False):
                weights = (q.float() @ k.float().mT).softmax(-1)
        else:
            weights = (q @ k.mT).softmax(-1)
        return weights @ v


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.attention = nn.LayerNorm(32), Attention(32, wide)

    def forward(self, x):
        return x + self.attention(self.norm(x))


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 4, 32),)


def buggy():
    return Model(), inputs()


def fixed():
    return Model(wide=True), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    with torch.autocast("cpu", torch.float16):
        assert not broken(*args).isfinite().all()
        assert whole(*args).isfinite().all()
