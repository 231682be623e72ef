"""(1 - mask) * -1e9 is -inf in float16; every row has a visible key, so the softmax absorbs it."""

import torch
from torch import nn

ID = "healthy_mask_times_1e9"
RUNS = ("native",)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        bias = (1 - mask.to(q.dtype)) * -1e9
        return (q @ k.mT * 0.25 + bias[:, None, :]).softmax(-1) @ v


def healthy():
    return Model().half(), (torch.randn(2, 6, 16).half(), torch.arange(6) < torch.tensor([[6], [3]]))
