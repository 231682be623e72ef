"""A long cumulative sum of log-decays that is kept in float32 inside a bfloat16 model."""

import torch
import torch.nn.functional as F
from torch import nn

ID = "healthy_float32_cumsum"
RUNS = ("native",)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.value, self.rate = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        total = (-F.softplus(self.rate(x)).float() * 0.05).cumsum(1)
        return self.value(x)[:, 1:] * (total[:, 1:] - total[:, :-1]).exp().to(x.dtype)


def healthy():
    return Model().bfloat16(), (torch.randn(1, 1024, 8).bfloat16(),)
