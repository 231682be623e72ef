"""A head initialised so small that its outputs are near 1e-9."""

import torch
from torch import nn

ID = "healthy_quiet_outputs"
RUNS = ("autocast:float16", "autocast:bfloat16")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4, bias=False)
        nn.init.normal_(self.head.weight, std=1e-9)

    def forward(self, x):
        return x[:, :4] + self.head(self.body(x).relu())


def healthy():
    return Model(), (torch.randn(5, 8),)
