"""ReLU linear attention sums keys times values over all tokens in float16.

Mechanism: k^T v over the tokens and its product with q pass 65504 before the division normalises them.
Source: https://github.com/mit-han-lab/efficientvit/issues/15
Expected: overflow at `attention`, in a product.
"""

import torch
import torch.nn.functional as F
from torch import nn

ID = "relu_linear_attention"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "attention", "op": "aten::bmm"}


class LinearAttention(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.qkv = wide, nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.wide:
            q, k, v = q.float(), k.float(), v.float()
        q, k = q.relu(), k.relu()
        v = F.pad(v, (0, 1), value=1.0)
        out = q @ (k.mT @ v)
        return (out[..., :-1] / (out[..., -1:] + 1e-4)).to(x.dtype)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.attention = nn.LayerNorm(8), LinearAttention(wide)
        with torch.no_grad():
            self.attention.qkv.weight.mul_(20)

    def forward(self, x):
        return x + self.attention(self.norm(x))


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 256, 8).half(),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    broken, whole = buggy()[0](*args), fixed()[0](*args)
    assert whole.isfinite().all()
    assert not broken.isfinite().all() or (broken - whole).float().norm() > 0.1 * whole.float().norm()
