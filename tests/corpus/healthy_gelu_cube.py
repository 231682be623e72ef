"""The cube inside the tanh form of GELU overflows float16, and tanh(inf) is 1 as it should be."""

import math

import torch
from torch import nn

ID = "healthy_gelu_cube"
RUNS = ("native",)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        with torch.no_grad():
            self.up.bias.copy_(torch.linspace(-50, 50, 16))

    def forward(self, x):
        x = self.up(x)
        return self.down(0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3)))))


def healthy():
    return Model().half(), (torch.randn(5, 8).half(),)
