"""A score below -16 is added to a mask of finfo.min, and float16 makes -inf of the sum.

Mechanism: padding and causal masks are finfo(dtype).min and added to the scores; a left-padded row without a visible
key becomes -inf throughout and its softmax NaN. The spacing of float32 and bfloat16 at finfo.min swallows the score.
Source: https://github.com/huggingface/transformers/pull/17306
Expected: overflow at `attention`, in the addition.
"""

import torch
from torch import nn

ID = "finfo_min_plus_bias"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "attention", "op": "aten::add.Tensor"}


class Attention(nn.Module):
    def __init__(self, additive):
        super().__init__()
        self.additive = additive
        self.qkv = nn.Linear(16, 48, bias=False)

    def forward(self, x, padded):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT * 0.25
        lowest = torch.finfo(scores.dtype).min
        length = x.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        if self.additive:
            scores = scores + torch.zeros_like(scores).masked_fill(future | padded[:, None, :], lowest)
        else:
            scores = scores.masked_fill(future | padded[:, None, :], lowest)
        return scores.softmax(-1) @ v


class Model(nn.Module):
    def __init__(self, additive=True):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.attention = nn.LayerNorm(16), Attention(additive)
        with torch.no_grad():  # every query looks away from the one channel that all tokens share
            self.attention.qkv.weight[:32] = torch.cat((3 * torch.eye(16), -3 * torch.eye(16)))

    def forward(self, x, padded):
        return x + self.attention(self.norm(x), padded)


def inputs():
    torch.manual_seed(0)
    x = torch.randn(2, 6, 16)
    x[..., 0] = 20
    return x.half(), torch.arange(6) < torch.tensor([[0], [2]])


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(additive=False).half(), inputs()


def manifests():
    model, args = buggy()
    out = model(*args)
    assert out[1, 0].isnan().all()
    assert out[0].isfinite().all()
    assert fixed()[0](*args).isfinite().all()
