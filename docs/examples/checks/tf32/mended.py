"""The product is computed in float32."""

import torch


def count():
    x = 100 + torch.randn(256, 8)
    return (x.T @ x / len(x)).diagonal() - x.mean(0) ** 2


def subject():
    torch.manual_seed(0)
    return count
