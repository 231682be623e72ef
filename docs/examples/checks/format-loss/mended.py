"""A norm before the layer brings all tokens to one size; a recipe with a scale for each row would do, too."""

import torch
from torch import nn


def subject():
    tokens = torch.randn(64, 32)
    tokens[0] *= 1e6
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 16)), (tokens,)
