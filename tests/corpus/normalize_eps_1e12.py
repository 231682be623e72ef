"""torch.nn.functional.normalize guards with eps=1e-12, which is zero in float16.

Mechanism: the embedding of a padding token is all zero; its norm is clamped to 0 and 0/0 is NaN.
Source: https://github.com/pytorch/pytorch/issues/32137
Expected: silent-zero at `unit`, where the clamp has nothing to clamp to.
"""

import torch
import torch.nn.functional as F
from torch import nn

ID = "normalize_eps_1e12"
RUN = "native"
EXPECTED = {"check": "silent-zero", "module": "unit"}


class Unit(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return F.normalize(x, dim=-1, eps=self.eps)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.unit = nn.Embedding(10, 8, padding_idx=0), Unit(1e-4 if wide else 1e-12)

    def forward(self, tokens):
        x = self.unit(self.embed(tokens))
        return x @ x.mT


def inputs():
    return (torch.tensor([[3, 4, 5, 0], [6, 7, 0, 0]]),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args).isfinite().all()
    assert fixed()[0](*args).isfinite().all()
