"""Zero-initialised output layers (adaLN-zero, LoRA): the branch is zero at the start, not lost."""

import torch
import torch.nn.functional as F
from torch import nn

ID = "healthy_zero_initialised"
RUNS = ("autocast:float16", "autocast:bfloat16")


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(dim, elementwise_affine=False), nn.Linear(dim, dim)
        self.modulation, self.low, self.up = nn.Linear(dim, 3 * dim), nn.Linear(dim, 2), nn.Linear(2, dim, bias=False)
        for layer in (self.modulation, self.up):
            nn.init.zeros_(layer.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x, condition):
        shift, scale, gate = self.modulation(F.silu(condition)).chunk(3, -1)
        hidden = self.norm(x) * (1 + scale) + shift
        return x + gate * self.mlp(hidden) + self.up(self.low(hidden))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, x, condition):
        for block in self.blocks:
            x = block(x, condition)
        return x


def healthy():
    return Model(), (torch.randn(5, 8), torch.randn(5, 8))
