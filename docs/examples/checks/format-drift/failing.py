"""One token is a million times the others: with one scale for the whole tensor, float8 trains on that token alone.

Run: ampcheck whatif failing.py:train --recipe tensorwise --steps 10
"""

import torch
from torch import nn


def train():
    tokens = torch.randn(64, 32)
    tokens[0] *= 1e6
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(10):
        loss = nn.functional.cross_entropy(model(tokens), torch.arange(64) % 8)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
