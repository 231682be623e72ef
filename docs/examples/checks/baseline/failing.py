"""The baseline accepts an overflow of this model, which was mended since; `ampcheck baseline --prune` removes it.

Run: ampcheck audit failing.py:subject --fast --dtype float16
"""

import torch


class Scaled(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 30.0


def subject():
    torch.manual_seed(0)
    return Scaled(4, 4), (torch.ones(2, 4),)
