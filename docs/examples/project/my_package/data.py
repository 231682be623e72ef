"""Batches for training."""

import torch
from torch import Tensor


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """So many pairs of inputs [32, 16] and targets [32, 4]; the same on each call."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(32, 16, generator=generator), torch.randn(32, 4, generator=generator)) for _ in range(count)]
