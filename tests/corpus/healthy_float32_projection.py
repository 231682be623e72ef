"""Points are projected in float32 inside of a bfloat16 model, and the disparity is a difference of near values.

Mechanism: the subtraction takes five of the seven digits of float32; two more than bfloat16 has are left.
"""

import torch
from torch import nn

ID = "healthy_float32_projection"
RUNS = ("autocast:bfloat16", "autocast:float16")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        left = torch.eye(4)[:3]
        right = left.clone()
        right[0, 3] = 0.5
        self.left, self.right = nn.Parameter(left), nn.Parameter(right)

    def forward(self, points):
        with torch.autocast("cpu", enabled=False):
            left, right = points @ self.left.T, points @ self.right.T
            disparity = right / right[:, 2:] - left / left[:, 2:]
        return disparity[:, 0] * 10


def healthy():
    torch.manual_seed(1)
    return Model(), (torch.cat([500 + 4 * torch.rand(16, 2), 5 + torch.rand(16, 1), torch.ones(16, 1)], 1),)
