"""One token is a million times the others: with one scale for the whole tensor, float8 leaves nothing of these.

Run: ampcheck whatif failing.py:subject --recipe tensorwise --no-front
"""

import torch
from torch import nn


def subject():
    tokens = torch.randn(64, 32)
    tokens[0] *= 1e6
    return nn.Linear(32, 16), (tokens,)
