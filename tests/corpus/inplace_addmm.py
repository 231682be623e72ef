"""addmm_ bypasses autocast and meets a bfloat16 activation with a float32 weight.

Mechanism: autocast covers the out-of-place overloads only; the low-rank update is accumulated in place.
Source: https://github.com/pytorch/pytorch/pull/32140
Expected: low-precision-error at `projection`, in addmm_.
"""

import pytest
import torch
from torch import nn

ID = "inplace_addmm"
RUN = "autocast:bfloat16"
EXPECTED = {"check": "low-precision-error", "module": "projection", "op": "aten::addmm_"}


class LowRank(nn.Module):
    def __init__(self, dim, rank, in_place):
        super().__init__()
        self.in_place = in_place
        self.base, self.down = nn.Linear(dim, dim), nn.Linear(dim, rank, bias=False)
        self.up = nn.Parameter(torch.randn(rank, dim) * 0.1)

    def forward(self, x):
        out, low = self.base(x), self.down(x)
        return out.addmm_(low, self.up) if self.in_place else out.addmm(low, self.up)


class Model(nn.Module):
    def __init__(self, in_place=True):
        super().__init__()
        self.projection, self.head = LowRank(8, 2, in_place), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.projection(x).relu())


def inputs():
    return (torch.randn(5, 8),)


def buggy():
    return Model(), inputs()


def fixed():
    return Model(in_place=False), inputs()


def manifests():
    model, args = buggy()
    assert model(*args).isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert fixed()[0](*args).isfinite().all()
        with pytest.raises(RuntimeError, match="same dtype"):
            model(*args)
