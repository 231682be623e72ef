"""Twelve pre-norm layers in 16 bits: ordinary rounding adds up."""

import torch
import torch.nn.functional as F
from torch import nn

ID = "healthy_deep_stack"
RUNS = ("autocast:float16", "autocast:bfloat16")


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.out, self.mlp = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + F.gelu(self.mlp(self.norms[1](x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(16) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def healthy():
    return Model(), (torch.randn(2, 8, 16),)
