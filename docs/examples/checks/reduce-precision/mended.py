"""Counts are integers."""

import torch


def count():
    total = torch.zeros(1, dtype=torch.int64)
    for tokens in torch.randint(900, 1100, (256, 1)):
        total = total + tokens
    return total.item()


def subject():
    torch.manual_seed(0)
    return count
