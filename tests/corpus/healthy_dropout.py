"""Dropout and a batch norm in training mode."""

import torch
from torch import nn

ID = "healthy_dropout"
RUNS = ("autocast:float16", "autocast:bfloat16")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(8, 4, 3))

    def forward(self, x):
        return self.net(x)


def healthy():
    return Model(), (torch.randn(4, 3, 10, 10),)
