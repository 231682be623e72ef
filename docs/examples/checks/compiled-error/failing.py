"""A cast to bfloat16 and back is meant to round; the compiler leaves it out, so that compiled code gives other values.

Run: ampcheck audit failing.py:subject
"""

import torch


def gate(x, weight):
    y = (x @ weight).to(torch.bfloat16).float()
    return (y * torch.sigmoid(y)).sum(1)


def subject():
    torch.manual_seed(0)
    return gate, [(torch.randn(64, 64), torch.randn(64, 64))]
