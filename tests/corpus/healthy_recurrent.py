"""An LSTM over 60 steps, its state in 16 bits."""

import torch
from torch import nn

ID = "healthy_recurrent"
RUNS = ("autocast:bfloat16",)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.lstm(x)[0])


def healthy():
    return Model(), (torch.randn(2, 60, 8),)
