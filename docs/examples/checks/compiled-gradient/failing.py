"""The author keeps this product in float32; its compiled backward runs under the autocast of the caller
(pytorch/pytorch#179804).

Run: ampcheck audit failing.py:subject --dtype bfloat16
"""

import torch
from torch import nn


class Float32Island(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return nn.functional.linear(x.float(), self.weight)


def subject():
    torch.manual_seed(0)
    return Float32Island(), [(torch.randn(8, 32),)]
