"""Integer positions below 2048 are exact in float16."""

import torch
from torch import nn

ID = "healthy_short_positions_in_half"
RUNS = ("native",)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        position = torch.arange(x.shape[1]).to(x.dtype)
        bias = -(position[:, None] - position[None]).abs() / 16
        return bias.softmax(-1) @ self.out(x)


def healthy():
    return Model().half(), (torch.randn(1, 300, 8).half(),)
