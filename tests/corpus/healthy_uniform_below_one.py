"""torch.rand never gives 1, so the logarithm of 1 - u is finite in 16 bits too."""

import torch
from torch import nn

ID = "healthy_uniform_below_one"
RUNS = ("native",)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 64)

    def forward(self, x):
        x = self.layer(x)
        return x - torch.log(1 - torch.rand_like(x))


def healthy():
    return Model().half(), (torch.randn(512, 4).half(),)
