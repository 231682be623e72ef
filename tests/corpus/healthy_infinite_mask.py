"""A mask of -inf fed to a softmax is deliberate; no row is masked throughout."""

import torch
from torch import nn

ID = "healthy_infinite_mask"
RUNS = ("autocast:float16", "autocast:bfloat16")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mT * 0.25).masked_fill(future, -torch.inf)
        return x + self.out(scores.softmax(-1) @ v)


def healthy():
    return Model(), (torch.randn(2, 6, 16),)
