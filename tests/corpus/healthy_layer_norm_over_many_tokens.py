"""The weight gradient of a layer norm over 4096 tokens, summed by the kernel of this CPU."""

import torch
import torch.nn.functional as F
from torch import nn

ID = "healthy_layer_norm_over_many_tokens"
RUNS = ("native",)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.out(F.gelu(self.mix(self.norm(x))))


def healthy():
    return Model().half(), (torch.randn(1, 4096, 16).half(),)
