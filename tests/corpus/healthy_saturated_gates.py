"""Sigmoid and tanh gates in saturation: their tails underflow and nothing depends on them."""

import torch
from torch import nn

ID = "healthy_saturated_gates"
RUNS = ("autocast:float16", "autocast:bfloat16")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        with torch.no_grad():
            self.gate.bias.copy_(torch.tensor([-20.0, 20] * 4))

    def forward(self, x):
        return self.out(self.gate(x).sigmoid() * self.value(x).tanh())


def healthy():
    return Model(), (torch.randn(5, 8),)
