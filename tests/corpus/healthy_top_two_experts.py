"""A mixture of experts in bfloat16: near ties between experts may fall either way."""

import torch
from torch import nn

ID = "healthy_top_two_experts"
RUNS = ("autocast:float16", "autocast:bfloat16")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 8, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weight * (chosen == number)).sum(-1, keepdim=True)
            out = out + (share * expert(x)).to(out.dtype)
        return out


def healthy():
    return Model(), (torch.randn(128, 16),)
