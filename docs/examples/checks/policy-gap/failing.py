"""The CPU samples a grid in float32, CUDA in float16: a test under the policy of the CPU does not see what CUDA loses.

Run: ampcheck policy lock failing.py:subject --device cpu,cuda --dtype float16
"""

import torch
from torch import nn


class Sample(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x, grid):
        features = self.conv(x)
        return nn.functional.grid_sample(features, grid.to(features.dtype), align_corners=False)


def subject():
    torch.manual_seed(0)
    return Sample(), (torch.randn(1, 3, 8, 8), torch.rand(1, 8, 8, 2))
