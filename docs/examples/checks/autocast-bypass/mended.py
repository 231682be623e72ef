"""The plain op, whose result is assigned."""

import torch


def subject():
    torch.manual_seed(0)
    total, a, b = torch.zeros(8, 8), torch.randn(8, 8), torch.randn(8, 8)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            return torch.addmm(total, a, b)

    return step
