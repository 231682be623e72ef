"""A layer whose ReLU never fires: its output and its gradients are zero in every precision."""

import torch
from torch import nn

ID = "healthy_dead_relu"
RUNS = ("autocast:float16", "autocast:bfloat16")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        nn.init.constant_(self.up.bias, -30.0)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def healthy():
    return Model(), (torch.randn(5, 8),)
