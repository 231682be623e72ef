"""The baseline names nothing of this target, as `ampcheck baseline --prune` leaves it."""

import torch


def subject():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4), (torch.randn(2, 4),)
