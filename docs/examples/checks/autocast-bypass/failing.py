"""The in-place variant of addmm has no autocast kernel: it runs in float32.

Run: ampcheck audit failing.py:subject
"""

import torch


def subject():
    torch.manual_seed(0)
    total, a, b = torch.zeros(8, 8), torch.randn(8, 8), torch.randn(8, 8)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            return total.clone().addmm_(a, b)

    return step
