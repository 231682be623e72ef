"""Masked mean pooling clamps its count with 1e-9, which is zero in float16.

Mechanism: a document without a visible token has count 0; clamp(min=1e-9) leaves it 0 and 0/0 is NaN.
Source: https://github.com/openvinotoolkit/openvino/pull/8676
Expected: silent-zero at `pool`.
"""

import torch
from torch import nn

ID = "pooling_clamp_1e9"
RUN = "native"
EXPECTED = {"check": "silent-zero", "module": "pool"}


class MeanPool(nn.Module):
    def __init__(self, least):
        super().__init__()
        self.least = least

    def forward(self, x, mask):
        mask = mask[..., None].to(x.dtype)
        return (x * mask).sum(1) / mask.sum(1).clamp(min=self.least)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.pool = nn.Linear(8, 8), MeanPool(1.0 if wide else 1e-9)

    def forward(self, x, mask):
        return self.pool(self.encoder(x).tanh(), mask)


def inputs():
    torch.manual_seed(1)
    return torch.randn(3, 5, 8).half(), torch.arange(5) < torch.tensor([[5], [2], [0]])


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args).isfinite().all()
    assert fixed()[0](*args).isfinite().all()
