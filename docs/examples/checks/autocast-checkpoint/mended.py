"""torch.utils.checkpoint restores the state."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def subject():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = checkpoint(model, x, use_reentrant=False).float().square().mean()
        loss.backward()

    return step
