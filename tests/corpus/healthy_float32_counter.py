"""A detached step counter in a float32 buffer far beyond 2048, used for a slow warm-up."""

import torch
from torch import nn

ID = "healthy_float32_counter"
RUNS = ("autocast:float16", "autocast:bfloat16")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("step", torch.tensor(70001.0))

    def forward(self, x):
        with torch.no_grad():
            self.step += 1
        return self.layer(x) * (self.step / 100000).clamp(max=1)


def healthy():
    return Model(), (torch.randn(5, 8),)
