"""A mask value of -1e9 cannot be written into float16 scores.

Mechanism: the constant suits float32; under float16 autocast the scores are half and masked_fill raises.
Source: https://github.com/NVIDIA/apex/issues/93
Expected: low-precision-error at `encoder.attention`.
"""

import pytest
import torch
from torch import nn

ID = "mask_minus_1e9"
RUN = "autocast:float16"
EXPECTED = {"check": "low-precision-error", "module": "encoder.attention", "op": "aten::masked_fill.Scalar"}


class Attention(nn.Module):
    def __init__(self, dim, heads, from_finfo):
        super().__init__()
        self.heads, self.from_finfo = heads, from_finfo
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, padding):
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * (dim // self.heads) ** -0.5
        lowest = torch.finfo(scores.dtype).min if self.from_finfo else -1e9
        weights = scores.masked_fill(padding[:, None, None, :], lowest).softmax(-1)
        return self.out((weights.to(v.dtype) @ v).transpose(1, 2).reshape(batch, length, dim))


class Encoder(nn.Module):
    def __init__(self, from_finfo):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), Attention(16, 2, from_finfo)

    def forward(self, x, padding):
        return x + self.attention(self.norm(x), padding)


class Model(nn.Module):
    def __init__(self, from_finfo=False):
        super().__init__()
        self.encoder, self.head = Encoder(from_finfo), nn.Linear(16, 4)

    def forward(self, x, padding):
        return self.head(self.encoder(x, padding))


def inputs():
    return torch.randn(2, 5, 16), torch.arange(5).expand(2, 5) >= torch.tensor([[5], [3]])


def buggy():
    return Model(), inputs()


def fixed():
    return Model(from_finfo=True), inputs()


def manifests():
    model, args = buggy()
    assert model(*args).isfinite().all()
    with torch.autocast("cpu", torch.float16):
        whole, same = fixed()
        assert whole(*same).isfinite().all()
        with pytest.raises(RuntimeError, match="without overflow"):
            model(*args)
