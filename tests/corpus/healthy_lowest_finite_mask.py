"""An additive mask of finfo.min overflows to -inf beside a negative score; the softmax absorbs it."""

import torch
from torch import nn

ID = "healthy_lowest_finite_mask"
RUNS = ("native",)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT * 0.25 - 20
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return (scores + torch.zeros_like(scores).masked_fill(future, torch.finfo(scores.dtype).min)).softmax(-1) @ v


def healthy():
    return Model().half(), (torch.randn(2, 6, 16).half(),)
