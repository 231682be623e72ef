"""A helper that imitates TF32 was left in: the product lost thirteen bits of each factor.

Run: ampcheck audit failing.py:subject
"""

import torch


def count():
    x = 100 + torch.randn(256, 8)
    cut = (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    return (cut.T @ cut / len(x)).diagonal() - x.mean(0) ** 2


def subject():
    torch.manual_seed(0)
    return count
