"""The baseline accepts an overflow of this model, which was mended since.

Run: ampcheck audit failing.py:subject --fast --dtype float16
"""

import torch


def subject():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4), (torch.randn(2, 4),)
