"""A cosine similarity divides by the root of a product of two sums of squares.

Mechanism: 300 * 300 overflows float16 although either norm fits; the similarity is 0.
Source: https://github.com/apache/mxnet/issues/11403
Expected: overflow at `similarity`.
"""

import torch
import torch.nn.functional as F
from torch import nn

ID = "cosine_through_sums_of_squares"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "similarity"}


class Similarity(nn.Module):
    def __init__(self, stable):
        super().__init__()
        self.stable = stable

    def forward(self, a, b):
        if self.stable:
            return (F.normalize(a, dim=-1, eps=1e-4) * F.normalize(b, dim=-1, eps=1e-4)).sum(-1)
        squares = a.square().sum(-1) * b.square().sum(-1)
        return (a * b).sum(-1) / squares.sqrt()


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.similarity = nn.Linear(64, 64), nn.Linear(64, 64), Similarity(wide)
        with torch.no_grad():
            self.left.weight.mul_(6)
            self.right.weight.mul_(6)

    def forward(self, a, b):
        return self.similarity(self.left(a), self.right(b))


def inputs():
    torch.manual_seed(1)
    return torch.randn(5, 64).half(), torch.randn(5, 64).half()


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    assert (buggy()[0](*args) == 0).all()
    assert (fixed()[0](*args) != 0).all()
