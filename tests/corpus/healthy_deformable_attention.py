"""Deformable attention in float16: the gradient by a coordinate jumps at each pixel, which rounding crosses."""

import torch
from torch import nn
from torch.nn import functional as F

ID = "healthy_deformable_attention"
RUNS = ("native",)


class Model(nn.Module):
    def __init__(self, dim=16, heads=4, points=4):
        super().__init__()
        self.heads, self.points = heads, points
        self.offsets, self.weights = nn.Linear(dim, heads * points * 2), nn.Linear(dim, heads * points)
        self.values, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, query, reference, features):
        batch, queries, dim = query.shape
        height, width = features.shape[1:3]
        values = self.values(features).view(batch, height * width, self.heads, -1).permute(0, 2, 3, 1)
        values = values.reshape(batch * self.heads, -1, height, width)
        offsets = self.offsets(query).view(batch, queries, self.heads, self.points, 2)
        weights = self.weights(query).view(batch, queries, self.heads, self.points).softmax(-1)
        size = torch.tensor([width, height], dtype=offsets.dtype)
        grid = 2 * (reference[:, :, None, None] + offsets / size) - 1
        grid = grid.transpose(1, 2).reshape(batch * self.heads, queries, self.points, 2)
        sampled = F.grid_sample(values, grid, align_corners=False).view(batch, self.heads, -1, queries, self.points)
        mixed = (sampled * weights.transpose(1, 2).unsqueeze(2)).sum(-1)
        return self.out(mixed.permute(0, 3, 1, 2).reshape(batch, queries, dim))


def healthy():
    torch.manual_seed(0)
    model = Model().half()
    return model, (torch.randn(2, 16, 16).half(), torch.rand(2, 16, 2).half(), torch.randn(2, 8, 8, 16).half())
