"""Counts of tokens are added up in bfloat16, which ends with another number.

Run: ampcheck audit failing.py:subject
"""

import torch


def count():
    total = torch.zeros(1, dtype=torch.bfloat16)
    for tokens in torch.randint(900, 1100, (256, 1)).bfloat16():
        total = total + tokens
    return total.item()


def subject():
    torch.manual_seed(0)
    return count
