"""ALiBi multiplies slopes and key positions in bfloat16.

Mechanism: at key 1500 the bias of a slope of 0.5 is 750 with a spacing of 4; the differences between neighbouring keys,
which are all that softmax sees, are 0 or 4 instead of 0.5.
Source: https://github.com/HabanaAI/vllm-fork/pull/503
Expected: integer-cast at `alibi`, where the positions are cast.
"""

import torch
from torch import nn

ID = "alibi_in_bfloat16"
RUN = "native"
EXPECTED = {"check": "integer-cast", "module": "alibi"}


class Alibi(nn.Module):
    def __init__(self, heads, wide):
        super().__init__()
        self.heads, self.wide = heads, wide

    def forward(self, length, dtype):
        dtype = torch.float32 if self.wide else dtype
        slopes = 2.0 ** -torch.arange(1, self.heads + 1, dtype=dtype)
        return slopes[:, None, None] * torch.arange(length).to(dtype)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.alibi = nn.Linear(8, 24, bias=False), Alibi(2, wide)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.mT)[:, None] * 8**-0.5 + self.alibi(x.shape[1], x.dtype)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return (scores.masked_fill(future, -torch.inf).softmax(-1).to(v.dtype) @ v[:, None]).sum(1)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 600, 8).bfloat16(),)


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    far, near = broken(*args)[:, -50:].float(), whole(*args)[:, -50:].float()
    assert (far - near).norm() > 0.3 * near.norm()
