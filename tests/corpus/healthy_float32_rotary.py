"""A rotary table in float32, cast once, in a bfloat16 model with long positions."""

import torch
import torch.nn.functional as F
from torch import nn

ID = "healthy_float32_rotary"
RUNS = ("native",)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        frequency = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float32) / 16)
        phase = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), frequency).repeat(1, 2)
        cos, sin = phase.cos().to(x.dtype), phase.sin().to(x.dtype)
        q, k = (y * cos + torch.cat((-y[..., 8:], y[..., :8]), -1) * sin for y in (q, k))
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]


def healthy():
    return Model().bfloat16(), (torch.randn(1, 900, 16).bfloat16(),)
