"""A chunked linear attention divides the keys by a decay that has shrunk to zero.

Mechanism: within a chunk, k / exp(cumsum(log decay)) is the inverse of a product that ends at e^-20, zero in float16.
Source: https://github.com/lucidrains/gateloop-transformer/pull/4
Expected: overflow at `chunk`, of what became zero.
"""

import torch
from torch import nn

ID = "chunk_decay_inverse"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "chunk"}


class Chunk(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, q, k, v, log_decay):
        total = (log_decay.float() if self.wide else log_decay).cumsum(1)
        decay = total.exp()
        scores = (q * decay) @ (k / decay).mT
        return (scores.tril() @ v.to(scores.dtype)).to(v.dtype)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.chunk = nn.Linear(8, 24), Chunk(wide)

    def forward(self, x, log_decay):
        return self.chunk(*self.qkv(x).chunk(3, -1), log_decay)


def inputs():
    torch.manual_seed(1)
    return torch.randn(1, 32, 8).half(), torch.full((1, 32, 8), -0.6).half()


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args).isfinite().all()
    assert fixed()[0](*args).isfinite().all()
