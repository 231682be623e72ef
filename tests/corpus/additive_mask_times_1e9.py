"""(1 - mask) * -1e9 is -inf in float16, and a row without a visible key is NaN.

Mechanism: the product overflows where float32 keeps -1e9 and gives such a row uniform weights.
Source: https://github.com/facebookresearch/fairseq/issues/3575
Expected: overflow at `attention`, in the product.
"""

import torch
from torch import nn

ID = "additive_mask_times_1e9"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "attention", "op": "aten::mul.Tensor"}


class Attention(nn.Module):
    def __init__(self, boolean):
        super().__init__()
        self.boolean, self.qkv = boolean, nn.Linear(8, 24)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT * 8**-0.5
        if self.boolean:
            scores = scores.masked_fill(~mask[:, None, :], torch.finfo(scores.dtype).min)
        else:
            scores = scores + ((1 - mask.to(q.dtype)) * -1e9)[:, None, :]
        return scores.softmax(-1) @ v


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.attention = nn.LayerNorm(8), Attention(wide)

    def forward(self, x, mask):
        return x + self.attention(self.norm(x), mask)


def inputs():
    torch.manual_seed(1)
    return torch.randn(3, 4, 8).half(), torch.arange(4) < torch.tensor([[4], [2], [0]])


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args).isfinite().all()
    assert fixed()[0](*args).isfinite().all()
